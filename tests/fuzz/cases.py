"""What a stranger's file may hold: seeded cases, by kind, and what must come of each.

A case is a valid input with a few things changed: values of other types, texts at the edge of Unicode, fields that are
missing, doubled or nested, bytes that are cut, flipped or repeated, files under other names. Using it ends in the right
result, which is worked out here from the plain input, or in one of the documented errors, in one line.

A further kind is one row in :data:`KINDS`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import pyarrow as pa
import pyarrow.parquet as pq

from lm_eval_elude.attacks.builders import ATTACKS
from lm_eval_elude.attacks.prompt import load_attack_file
from lm_eval_elude.board import keeper, pages, site
from lm_eval_elude.board import score as scores
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.verify import verify
from lm_eval_elude.data import bundled, dataset, jsonio
from lm_eval_elude.data.manifest import FILE_NAME, read_manifest
from lm_eval_elude.data.targets import resolve_target
from lm_eval_elude.errors import UserError
from lm_eval_elude.report import frame, kept, paper
from lm_eval_elude.report.comparison import named_runs
from lm_eval_elude.report.rows import rows as paper_rows
from lm_eval_elude.scoring.metrics import THREE
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.settings import resolve_settings
from tests.support import mini_rows

RONALDO, MESSI = "Cristiano Ronaldo", "Lionel Messi"
TRAINED = ("entity", "question", "answer", "input")  # the columns that a loss reads
TEXTS = (*TRAINED, "paraphrased_question", "paraphrased_answer", "source")


class Kind(NamedTuple):
    """One door: ``make`` writes a case into an empty folder, ``use`` reads it and checks what it gets."""

    make: Callable[[random.Random, Path], Any]
    use: Callable[[Any], None]


def run(kind: str, seed: int, folder: Path) -> bool:
    """Make and use one case; whether it was taken.

    Raises:
        AssertionError: the result is wrong or the error is not a documented one in one line.
    """
    case = KINDS[kind].make(random.Random(f"{kind}-{seed}"), folder)
    try:
        KINDS[kind].use(case)
    except UserError as error:
        message = str(error)
        assert message and len(message) < 4_000, f"{len(message)} characters: {message[:300]}"
        assert len(message.splitlines()) == 1, f"several lines: {message!r}"
        message.encode()
        return False
    return True


# ---- changes
def odd_value(rng: random.Random) -> Any:
    deep: Any = "bottom"
    for _ in range(rng.choice([3, 70, 400])):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return rng.choice([
        None, True, False, 0, -1, 5, 1.5, -0.0, float("nan"), float("inf"), 10**39, -(10**60), 10**4_000,
        "", " ", "\n", "\u3000", "\0", "\x1b[2J", "\ud800", "a\udfff", "\u2028", "\ufeff", "é", "e\u0301", "ガ", "😀",
        "x" * 9_000,  "İ", "_", "__", "a\nb", "NaN", "null", "../..", "<img src=x>", "ronaldo",
        "Cristiano_Ronaldo", " Lionel Messi ",
        [], {}, [[]], {"a": 1}, {"": ""}, {"fr": 5}, {"fr": None}, {"fr": "Où ?"}, ["a"], ["a"] * 5, ["a"] * 6,
        [1] * 5, [None] * 5, ["a", "b", "c", "d", " "], [["a"]] * 5, "abcde", deep,
    ])  # fmt: skip


def change_row(rng: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """A row with one field changed, lost, renamed, added or filled with another's value."""
    if not isinstance(row, dict):
        return row
    row = dict(row)
    field = rng.choice([*row, "input", "translated_question", "source", "extra"])
    match rng.randrange(6):
        case 0:
            row.pop(field, None)
        case 1:
            row[rng.choice([field.upper(), f" {field}", "", "\ud800", "\0"])] = row.pop(field, None)
        case 2:
            row[field] = row[rng.choice(list(row))] if row else None
        case 3 if isinstance(row.get(field), list) and row[field]:
            items = list(row[field])
            items[rng.randrange(len(items))] = odd_value(rng)
            row[field] = items
        case _:
            row[field] = odd_value(rng)
    return row


def change_within(rng: random.Random, value: Any) -> Any:
    """A value with something changed at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice(list(value))
        return value | {key: change_within(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], change_within(rng, value[at]), *value[at + 1 :]]
    return change_row(rng, value) if isinstance(value, dict) and rng.random() < 0.7 else odd_value(rng)


def change_some(
    rng: random.Random, values: Sequence[Any], change: Callable[[random.Random, Any], Any] = change_row
) -> list[Any]:
    """Values of which mostly one is changed, seldom into something of another kind."""
    values = list(values)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        at = rng.randrange(len(values))
        values[at] = change(rng, values[at]) if rng.random() < 0.95 else odd_value(rng)
    return values


def dump(rng: random.Random, value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")


def dump_lines(rng: random.Random, rows: Sequence[Any]) -> bytes:
    return b"".join(dump(rng, row) + b"\n" for row in rows)


def written(rng: random.Random, values: Sequence[Any], chance: float = 0.3) -> bytes:
    """A line of JSON for each value, sometimes with changed bytes."""
    content = dump_lines(rng, values)
    return change_bytes(rng, content) if rng.random() < chance else content


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Cut, flip, repeat, insert."""
    at, to = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    junk = rng.choice([
        b"\xff", b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\",
        b"\n", b"\r", b"\xe2\x80\xa8", b"NaN", b"1e999", b"-", b"9" * 4_400, b"[" * 3_000,
        b'{"a":' * 3_000, b"/*", b"null", b'"a":1,', b'"answer":1,',
    ])  # fmt: skip
    match rng.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + junk + content[at:]
        case 2:
            return content[:at] + junk + content[to:]
        case 3:
            return content[:to] + content[at:]
        case _:
            flipped = bytearray(content)
            for _ in range(rng.choice([1, 1, 1, 20])):
                if flipped:
                    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)


def plain(text: str) -> Any:
    """What Python alone reads; None where it reads nothing or where our bounds refuse it."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise ValueError
        return dict(items)

    try:
        value = json.loads(text, object_pairs_hook=pairs)
        json.dumps(value, ensure_ascii=False).encode()  # ValueError: half a character
        return None if depth(value) > 64 else value
    except (ValueError, RecursionError):
        return None


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


# ---- data sets
class Data(NamedTuple):
    source: Path
    subset: str
    split: str
    rows: list[Any] | None  # what the file holds, None where it cannot be read
    targets: tuple[str, ...]


BASE = {
    "forget_qa-train": [*mini_rows("forget_qa-train", 3, RONALDO), *mini_rows("forget_qa-train", 2, MESSI)],
    "retain_qa-test": mini_rows("retain_qa-test", 4),
    "world-test": mini_rows("world-test", 4),
    "world-train": mini_rows("world-train", 4),
}


def make_data(rng: random.Random, folder: Path) -> Data:
    stem = rng.choice(list(BASE))
    about = {"aliases": ["CR7", "é"], "others": ["Ada Example"], "thing": False} if rng.random() < 0.2 else {}
    rows = change_some(rng, [row | about for row in BASE[stem]])
    ending = rng.choice([".jsonl", ".jsonl", ".json", ".parquet", ".JSONL", ".Json"])
    path = folder / f"{stem}{ending}"
    if ending == ".parquet":
        found = write_parquet(rng, path, stem)
    else:
        content = dump(rng, rows) if ending.lower() == ".json" else dump_lines(rng, rows)
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            content = change_bytes(rng, content)
        path.write_bytes(content)
        found = read_plain(content, ending.lower())
    subset, split = stem.replace("_qa", "").split("-")
    targets = tuple(rng.sample([RONALDO, MESSI], rng.choice([0, 1, 2])))
    whole = subset == "forget" and rng.random() < 0.5
    return Data(path if whole else folder, subset, split, found, targets)


def read_plain(content: bytes, ending: str) -> list[Any] | None:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if ending == ".json" and text.lstrip().startswith("["):
        value = plain(text)
        return value if isinstance(value, list) else None
    rows = [plain(line) for line in text.split("\n") if line.strip()]
    return None if None in [row if row != [] else 0 for row in rows] else rows


def write_parquet(rng: random.Random, path: Path, stem: str) -> list[Any] | None:
    """Columns of other types, unused ones of types that nobody reads, and bytes changed."""
    rows = BASE[stem]
    table = pa.Table.from_pylist(rows)
    size = len(rows)
    columns = [
        pa.array(range(size)), pa.array([float("nan")] * size), pa.array([None] * size), pa.array([b"\xff"] * size),
        pa.array([{"a": "b"}] * size), pa.array([["a"] * 5] * size), pa.array([["a"] * 4] * size), 
        pa.array([True] * size), pa.array(["x"] * size).dictionary_encode(), pa.array([1] * size, pa.decimal128(30, 2)),
        pa.array([["a", None, "b", "c", "d"]] * size), pa.array([1] * size, pa.timestamp("us", tz="Nowhere/Atall")),
        pa.array([10**12] * size, pa.timestamp("s")), pa.array([10**12] * size, pa.duration("s")),
        pa.array(["x"] * size, pa.large_string()),
        pa.array([[("fr", "Où ?")]] * size, pa.map_(pa.string(), pa.string())), pa.array([{"fr": "Où ?"}] * size),
    ]  # fmt: skip
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice([*table.column_names, "when", "source", "input", "translated_question"])
        if table.column_names.count(name) == 1:
            table = table.drop_columns([name])
        if rng.random() < 0.8:
            table = table.append_column(name, rng.choice(columns))
            if rng.random() < 0.05:
                table = table.append_column(name, rng.choice(columns))
    pq.write_table(table, path, compression=rng.choice(["snappy", "none"]))
    if rng.random() < 0.4:
        path.write_bytes(change_bytes(rng, path.read_bytes()))
    try:
        names = [n for n in pq.read_schema(path).names if n in (*TEXTS, "perturbed_answer", "translated_question")]
        found: list[Any] = pq.read_table(path, columns=names).to_pylist() if len({*names}) == len(names) else None
        return found
    except Exception:
        return None


def stated(row: dict[str, Any], scored: bool = False) -> dict[str, Any] | None:
    """A record's columns as the documented rules make them of a row; None where they refuse it."""
    wrong, languages = row.get("perturbed_answer"), row.get("translated_question")
    right = (
        all(isinstance(row.get(name), str | None) for name in TEXTS)
        and (wrong is None or wrong == [] or five_texts(wrong))
        and (languages is None or isinstance(languages, dict))
        and all(isinstance(text, str | None) for text in (languages or {}).values())
    )
    texts = {name: (row.get(name) or "").strip() for name in TEXTS} if right else {}
    if not texts or not texts["question"] or not texts["answer"]:
        return None
    if scored and not (texts["paraphrased_answer"] and wrong):
        return None
    extra = texts.pop("input")
    return texts | {
        "entity": " ".join(normalize("NFC", texts["entity"]).replace("_", " ").split()),
        "question": f"{texts['question']}\n\n{extra}" if extra else texts["question"],
        "perturbed_answer": [t.strip() for t in wrong or []],
        "translated_question": {k: v.strip() for k, v in (languages or {}).items() if v and v.strip()},
    }


def five_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 5 and all(isinstance(t, str) and t.strip() for t in value)


def use_data(case: Data) -> None:
    source, (_, subset, split, rows, targets) = str(case.source), case
    readable = rows is not None and all(isinstance(row, dict) for row in rows)

    def wanted(row: dict[str, Any]) -> bool:
        entity = row.get("entity")
        named = isinstance(entity, str) and " ".join(normalize("NFC", entity).replace("_", " ").split()) in targets
        return not targets or subset == "world" or named or not isinstance(entity, str)

    mine = [row for row in rows or [] if isinstance(row, dict) and wanted(row)]
    mine = [{**row, "entity": ""} for row in mine] if subset == "world" else mine
    by_target = bool(targets) and subset != "world"
    for scored, strict in ((False, True), (True, True), (False, False)):
        records = [
            None if by_target and not isinstance(row.get("entity"), str)
            else stated(row, scored) or (None if strict else stated({name: row.get(name) for name in TRAINED}))
            for row in mine
        ]  # fmt: skip
        kept = [record for record in records if record]
        missing = by_target and set(targets) - {record["entity"] for record in kept}
        refused = not readable or not kept or bool(missing) or (strict and None in records)
        try:
            found = dataset.load_records(source, subset, split, targets, scored=scored, strict=strict)  # type: ignore[arg-type]
        except UserError:
            assert refused, f"{source} is refused, scored {scored}, strict {strict}"
            continue
        assert not refused, f"{source} is taken, scored {scored}, strict {strict}"
        assert [record.columns() for record in found.records] == kept
        odd = [row for row, record in zip(mine, records, strict=True) if record is None or not stated(row)]
        assert len(found.odd) == len(odd)
    if subset == "forget":
        assert case.source.is_file() or not readable or list(dataset.read_rows(next(case.source.iterdir())))
        for name in dataset.entities(source):
            (target,) = dataset.resolve_targets(source, [name])
            assert target.name == name and "/" not in target.slug != ""
            assert all(isinstance(other, str) for other in (*target.aliases, *target.others))
    dataset.load_records(source, subset, split, targets)  # type: ignore[arg-type]  # the case's own outcome


# ---- manifests
MANIFEST = json.loads((bundled.REFERENCE / FILE_NAME).read_text("utf-8"))
MANIFEST |= {"settings": {"epochs": 3, "lora": None}, "epochs": [{"loss": 0.5}], "base_model": {"name": "tiny"}}
TABLES = {"data", "data_fingerprints", "weights", "versions"}  # of texts by name


def make_manifest(rng: random.Random, folder: Path) -> tuple[Path, Any]:
    content = written(rng, change_some(rng, [MANIFEST]))
    (folder / FILE_NAME).write_bytes(content)
    try:
        return folder, plain(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return folder, None


def use_manifest(case: tuple[Path, Any]) -> None:
    folder, table = case
    found = read_manifest(folder)
    assert found is not None and isinstance(table, dict), "a manifest that is none is taken"
    assert isinstance(table["dataset"], str) and all(isinstance(target, str) for target in table["targets"])
    assert list(found.targets) == table["targets"] and isinstance(table["targets"], list)
    assert found.schema_version == 1 and type(found.seed) in (int, type(None)) and isinstance(found.method, str)
    for name in TABLES:
        assert all(isinstance(text, str) for text in getattr(found, name).values())
        assert getattr(found, name) == table.get(name, {})
    assert all(isinstance(epoch, dict) for epoch in found.epochs) and isinstance(found.settings, dict)
    assert set(table) <= set(MANIFEST) | {"data"}


# ---- attack files
ATTACK_TEXTS = ("type", "target", "prompt", "answer", "paraphrased_answer")
ATTACK_ROWS = [
    {
        "type": kind, "target": RONALDO, "prompt": f"{row['question']} Answer at once.", "answer": row["answer"],
        "paraphrased_answer": row["paraphrased_answer"], "perturbed_answer": row["perturbed_answer"],
        "question": row["question"], "record": number,
    }
    for number, (kind, row) in enumerate(zip(list(ATTACKS)[:4], mini_rows("forget_qa-train", 4, RONALDO), strict=True))
]  # fmt: skip


def make_attacks(rng: random.Random, folder: Path) -> tuple[Path, list[Any] | None]:
    content = written(rng, change_some(rng, ATTACK_ROWS))
    (folder / "attacks.jsonl").write_bytes(content)
    return folder / "attacks.jsonl", read_plain(content, ".jsonl")


def use_attacks(case: tuple[Path, list[Any] | None]) -> None:
    path, read = case

    def right(row: Any) -> bool:
        return (
            isinstance(row, dict)
            and all(isinstance(row.get(name), str) and row[name].strip() for name in ATTACK_TEXTS)
            and row["type"].strip() in ATTACKS and row["target"].strip() == RONALDO
            and five_texts(row.get("perturbed_answer"))
            and isinstance(row.get("question", ""), str) and type(row.get("record", -1)) is int
        )  # fmt: skip

    attack = next(iter(ATTACKS))
    rows = read if read is not None and all(map(right, read)) else []
    expected = [row for row in rows if row["type"].strip() == attack]
    try:
        found = load_attack_file(path, resolve_target(RONALDO), attack)
    except UserError:
        assert not expected, f"{path} is refused"
        raise
    assert [(p.prompt, p.answer, p.paraphrased_answer, list(p.perturbed_answer), p.record) for p in found] == [
        (row["prompt"].strip(), row["answer"].strip(), row["paraphrased_answer"].strip(),
         [text.strip() for text in row["perturbed_answer"]], row.get("record", -1))
        for row in expected
    ]  # fmt: skip


# ---- --metadata
def text(value: Any) -> bool:
    return isinstance(value, str)


def names(value: Any) -> bool:
    return value != [] and all(text(name) and name for name in (value if isinstance(value, list) else [value]))


# Of each key some right values, and whether a value is of the kind that it takes.
KEYS: dict[str, tuple[list[Any], Callable[[Any], bool]]] = {
    "target": (["ronaldo", "CR7", "Lionel Messi", ["messi", "swift"], "all of them"], names),
    "dataset": (["mini", "no/such", "~nobody_here/x", "a\0b", "x" * 5_000, "hub@"], text),
    "truth_ratio": (["geometric", "arithmetic"], lambda v: v in ("geometric", "arithmetic")),
    "guardrail": ([True, False, "true", "False"], lambda v: str(v).lower() in ("true", "false")),
    "attack_file": (["mine.jsonl", ""], text),
    "attack_seed": ([0, 2**32 - 1], lambda v: type(v) is int and 0 <= v < 2**32),
    "attack_prompts": ([1, 100], lambda v: type(v) is int and 1 <= v <= 100),
    "mia_reference": (["some/model"], text),
    "original": (["some/model", ""], text),
}
MISTYPED = ("targets", "datset", "guardrial", "atack_file")


def make_metadata(rng: random.Random, folder: Path) -> tuple[dict[str, Any], set[str]]:
    """Metadata, and the keys whose value is of a kind that they do not take."""
    metadata = {"target": "ronaldo", "dataset": "mini", "pretrained": rng.choice(["some/model", str(folder), 5, None])}
    for key in rng.sample(list(KEYS), rng.choice([1, 2, 3])):
        metadata[key] = rng.choice(KEYS[key][0]) if rng.random() < 0.5 else odd_value(rng)
    if rng.random() < 0.2:
        metadata[rng.choice([*MISTYPED, "colour", "seed", "\ud800", ""])] = odd_value(rng)
    if rng.random() < 0.2:
        make_manifest(rng, folder)
    return metadata, {key for key, (_, right) in KEYS.items() if key in metadata and not right(metadata[key])}


def use_metadata(case: tuple[dict[str, Any], set[str]]) -> None:
    metadata, wrong = case
    try:
        found = resolve_settings(metadata)
    except UserError as error:
        at_fault = wrong | (metadata.keys() & {*MISTYPED})
        assert not at_fault or any(key in str(error) for key in at_fault), f"no key is named: {error}"
        raise
    assert not wrong, f"taken: {wrong}"
    assert found.seed == metadata.get("attack_seed", 0) and found.attack_file == metadata.get("attack_file", "")
    assert str(found.guardrail).lower() == str(metadata.get("guardrail", False)).lower()
    assert found.targets and set(found.targets) <= set(dataset.entities(found.dataset))


# ---- submissions
SCORED = {
    "targets": [RONALDO], "dataset": "mini", "truth_ratio": "geometric", "guardrail": False, "attack_file": "",
    "seed": 0, "checkpoint": [{"name": "tiny", "weights": {}}], "data": {"dataset": "mini"}, "versions": {},
    "template": "0" * 16,
}  # fmt: skip
RUN = {
    "results": {"elude_forget": {"probability,none": 0.5, "probability_stderr,none": "N/A"}},
    "configs": {"elude_forget": {"metadata": {"elude": {**SCORED, "fingerprint": "0", "n": 2, "aggregates": {}}}}},
    "config": {"limit": None}, "n-samples": {"elude_forget": {"original": 2, "effective": 2}},
}  # fmt: skip
LOGGED = [
    {"doc_id": i, "doc": {"id": i, **row, "answer_scores": [[-1.5, 3]] * 7, "generated": "No."}, "arguments": {
        f"gen_args_{j}": {"arg_0": row["question"], "arg_1": row["answer"]} for j in range(7)
    }, "resps": [[["-1.5", "False"]]] * 7, "filtered_resps": [["-1.5", "False"]] * 7, "metrics": []}
    for i, row in enumerate(mini_rows("forget_qa-train", 2, RONALDO))
]  # fmt: skip


def submission_of(folder: Path, results: bytes, samples: bytes) -> dict[str, Any]:
    """The files of a submission besides the first one, which is returned as a table."""
    files = {packed.RESULTS: results, f"{packed.SAMPLES}/elude_forget.jsonl.gz": samples}
    (folder / packed.SAMPLES).mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {
        "model": "m", "base_model": "b", "method": "none", "role": "submission", "submitter": "A. Nobody",
        "hardware": "", "trained_on": "", "scored": SCORED, "fingerprints": {"elude_forget": "0"}, "weights": {},
        "schema_version": 1,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }  # fmt: skip


def make_submission(rng: random.Random, folder: Path) -> tuple[Path, Any]:
    run, *rows = change_some(rng, [RUN, *LOGGED], change_within)
    samples = gzip.compress(dump_lines(rng, rows))
    samples = change_bytes(rng, samples) if rng.random() < 0.3 else samples
    table: Any = submission_of(folder / "submission", dump(rng, run), samples)
    content = written(rng, [change_within(rng, table) if rng.random() < 0.5 else table], 0.2)
    (folder / "submission" / packed.FILE_NAME).write_bytes(content)
    return folder / "submission", plain(content.decode("utf-8", "replace"))


def use_submission(case: tuple[Path, Any]) -> None:
    folder, table = case
    verdict = verify(folder)
    assert verdict.findings and not verdict.level, "what is no submission passes"
    for line in verdict.findings:
        assert line.isprintable() and len(line) < 1_000, f"not one clear line: {line!r}"
    if verdict.submission is None:
        raise UserError(verdict.findings[0])
    assert isinstance(table, dict) and verdict.submission.files == table["files"]
    assert all(isinstance(getattr(verdict.submission, name), str) for name in ("model", "base_model", "submitter"))


# ---- results files with their logged samples
def logged(task: str) -> list[dict[str, Any]]:
    sides = 2 if task == "elude_mia" else 7
    return [
        {"doc": {
            **row, "id": number, "generated": row["answer"], "answer_scores": [[-1.0 - s, 4] for s in range(sides)],
            "plain_question": row["question"],
        }, "filtered_resps": []}
        for number, row in enumerate(mini_rows("forget_qa-train", 4, RONALDO))
    ]  # fmt: skip


TASKS = ("elude_forget", "elude_mia", "elude_attack_role_playing", "elude_attack_none")


def make_results(rng: random.Random, folder: Path) -> tuple[Path, bool]:
    """A results file, and whether it or its samples were changed."""
    settings = SCORED | {"fingerprint": "f", "n": 4, "aggregates": {}}
    results: dict[str, Any] = {
        "results": {name: {"probability,none": 0.5} for name in (*TASKS, "elude_attacks")},
        "configs": {task: {"metadata": {"elude": settings}} for task in TASKS}, "group_subtasks": {},
        "config": {"model": "hf", "model_args": {"pretrained": "made-up"}, "batch_size": 1, "limit": None},
    }  # fmt: skip
    files: dict[str, Any] = {"results_2026.json": [results]}
    files |= {f"samples_{task}_2026.jsonl": logged(task) for task in TASKS}
    changes = rng.choice([0, 1, 1, 1, 2])
    for name in rng.choices(list(files), k=changes):
        files[name] = change_within(rng, files[name])
    for name, rows in files.items():
        (folder / name).write_bytes(written(rng, rows if isinstance(rows, list) else [rows], 0.1 if changes else 0))
    return folder / "results_2026.json", bool(changes)


def use_results(case: tuple[Path, bool]) -> None:
    path, changed = case
    run = Run(path)
    try:
        (named,) = named_runs([str(path)])
        numbers = named.estimates
    except UserError:
        assert changed, "a right file is refused"
        raise
    for estimate in numbers.values():
        assert isinstance(estimate.value, float) and isinstance(estimate.n, int), estimate
    if not changed:
        assert {task for task, *_ in numbers} == {*TASKS, "elude_attacks"}
        probability = numbers["elude_forget", "", "probability"]
        assert (probability.value, probability.n) == (math.exp(-1 / 4), 4)
    for task in run.tasks:
        run.settings(task), run.reported(task)
    lines = paper_rows([named])
    for name in ("never_knew", "attacks"):
        frame.markdown(paper.table(name, lines, "llama-3.1"))


# ---- our own files, changed by another hand: nothing that is not ours may go
def make_own(rng: random.Random, folder: Path, files: dict[Path, Any]) -> tuple[Path, dict[Path, bytes]]:
    """Our files, most often with one changed, beside those of others, whose contents are returned."""
    others = {folder / "mine.txt": b"mine", folder / "ours" / "mine.txt": b"mine", folder / "mine.json": b"{}"}
    changed = rng.choice([*files]) if rng.random() < 0.8 else None
    for path, value in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(written(rng, [change_within(rng, value)]) if path == changed else dump(rng, value))
    for path, content in others.items():
        path.write_bytes(content)
    return folder / "ours", others


def untouched(others: dict[Path, bytes]) -> None:
    assert {path: path.read_bytes() for path in others} == others, "a file of others is changed"


NUMBER = {"value": 0.5, "stderr": 0.1}
TABLE = keeper.Table(
    "t", "mini", ("b",), (SCORED["template"],), tuple(SCORED["targets"]), SCORED["seed"], SCORED["truth_ratio"],
    {"elude_forget": "0"},
)  # fmt: skip
ROW = {
    "stamp": site.Measure(TABLE, "", [], False, {}).stamp, "remarks": ["not looked at"], "answers": "0",
    "columns": dict.fromkeys(scores.NAMES, NUMBER), "measured": {"rq": 0.5},
    "score": {**NUMBER, "parts": dict.fromkeys(pages.PARTS, 0.5), "worst": {"fq": "elude_attack_none"}},
}  # fmt: skip


def make_site(rng: random.Random, folder: Path) -> tuple[Path, dict[Path, bytes]]:
    """A board of one submission that does not verify, and a site with what was formed of it as if it did."""
    inside, out = folder / "submissions" / "one", folder / "ours"
    table = submission_of(inside, dump(rng, RUN), gzip.compress(dump_lines(rng, LOGGED)))
    (inside / packed.FILE_NAME).write_text(json.dumps(table))
    digest = packed.digest(inside)
    names = [f"data/{digest}.json", f"data/{'0' * 64}.json", f"submissions/{digest}.html", "index.html",
             "leaderboard.json", "leaderboard.csv"]  # fmt: skip
    verdict = {"digest": digest, "level": "rescored", "findings": [], "remarks": []}
    report = ['<p id="standing"></p>']
    files = {out / site.FILES: names, out / f"data/{digest}.json": ROW, out / f"submissions/{digest}.html": report}
    (folder / keeper.FILE).write_text(keeper.toml(TABLE))
    return make_own(rng, folder, {**files, folder / "verdicts/one.json": verdict})


def use_site(case: tuple[Path, dict[Path, bytes]]) -> None:
    out, others = case
    try:
        done = site.build(out.parent, out)
    finally:
        untouched(others)
    board = jsonio.load(out / "leaderboard.json")
    assert sum(len(table["rows"]) for table in board["tables"]) == done.rows == 1 - ("one" in done.refused)
    if done.refused:  # a submission, or a verdict
        raise UserError(next(iter(done.refused.values())))
    assert "<img" not in (out / "index.html").read_text("utf-8")


RUNS = {
    "base": "b", "arguments": {"opt-out": ["--method", "opt-out"]}, "columns": [*kept.COLUMNS],
    "data": [
        [run, "ada", seed, f"elude_{subset}", metric, 0.5]
        for run in ("opt-out",) for seed in (0, 1) for subset in ("forget", "retain", "world")
        for metric in THREE
    ],
}  # fmt: skip


def make_kept(rng: random.Random, folder: Path) -> Path:
    (folder / "results.json").write_bytes(written(rng, [change_within(rng, RUNS) if rng.random() < 0.8 else RUNS]))
    return folder / "results.json"


def use_kept(path: Path) -> None:
    runs = kept.read(path)
    if runs is None:
        raise UserError("no list of runs")
    for row in kept.rows(runs):
        assert all(isinstance(estimate.value, float) for estimate in row.numbers.values())


KINDS = {
    "results": Kind(make_results, use_results),
    "metadata": Kind(make_metadata, use_metadata),
    "submission": Kind(make_submission, use_submission),
    "data": Kind(make_data, use_data),
    "manifest": Kind(make_manifest, use_manifest),
    "attacks": Kind(make_attacks, use_attacks),
    "site": Kind(make_site, use_site),
    "kept": Kind(make_kept, use_kept),
}
