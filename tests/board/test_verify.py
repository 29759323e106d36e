"""A submission passes as it was packed; altered in any of hundreds of ways, or hostile, it does not."""

import gzip
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.verify import verify
from lm_eval_elude.data import dataset
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.benchmark import GUARDRAIL
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from tests.board import runs
from tests.board.runs import changed, hashed_again, load
from tests.support import elude, make_model, make_tokenizer, save_checkpoint, small_data, write_jsonl


@pytest.fixture
def copy(submitted, tmp_path):
    return Path(shutil.copytree(submitted, tmp_path / "copy"))


@pytest.fixture(scope="module")
def renderer():
    return Renderer(load_tokenizer(str(runs.TINY)))


def test_a_submission_passes_as_it_was_packed(submitted, data, renderer, copy):
    bare = verify(submitted, data=str(data))
    assert not bare.findings and bare.level == "recomputed"
    assert ["tokenizer" in remark for remark in bare.remarks] == [True]
    whole = verify(submitted, data=str(data), renderer=renderer)
    assert not whole.findings and not whole.remarks
    top(model="<script>alert(1)</script>")(copy)  # markup in a name is a name
    assert not verify(copy, data=str(data)).findings
    # Every number of the results file was formed again.
    results = load(submitted / packed.RESULTS)["results"]
    assert set(results) == set(whole.numbers)
    for name, row in results.items():
        formed = {key for key in row if key.endswith(",none") and "_stderr" not in key}
        assert formed == {f"{metric},none" for metric in whole.numbers[name]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["guardrail", "attack file", "two targets"])
def test_an_honest_submission_of_another_kind_passes_too(kind, renderer, tmp_path):
    targets = [runs.RONALDO, "Taylor Swift"] if kind == "two targets" else [runs.RONALDO]
    data = small_data(tmp_path / "data", dict.fromkeys(targets, 4), retain=3, world=2)
    asked: dict[str, Any] = {"target": targets}
    if kind == "guardrail":
        asked["guardrail"] = True
    if kind == "attack file":
        records = dataset.load_records(str(data), "forget", "train", targets).records
        (target,) = dataset.resolve_targets(str(data), targets)
        prompts = [prompt for attack in ATTACKS for prompt in build_attacks(records, target, attack, n=3, seed=1)]
        write_jsonl(tmp_path / "mine.jsonl", [msgspec.to_builtins(prompt) for prompt in prompts])
        asked["attack_file"] = str(tmp_path / "mine.jsonl")
    run = runs.finished(tmp_path / "run", runs.TINY, data, metadata=asked)
    packed_run = runs.submission(tmp_path / "submission", run)
    if kind == "attack file":
        assert len(run.rows("elude_attack_role_playing")) == 3  # all of its rows, whatever attack_prompts says
    for tokenizer in (None, renderer):
        assert verify(packed_run, data=str(data), renderer=tokenizer).findings == []


@pytest.mark.parametrize(("alter", "finding"), [
    (lambda copy: runs.scored_otherwise(copy, template="0" * 16), "the template is not that of the tokenizer given"),
    (lambda copy: prompted(copy), "the run had a --system_instruction"),
    (lambda copy: top(role="submission")(copy), "the checkpoint did not forget all that was scored"),
])  # fmt: skip
def test_what_a_run_says_of_itself_is_looked_at(alter, finding, copy, data, renderer):
    alter(copy)
    assert any(finding in line for line in verify(copy, data=str(data), renderer=renderer).findings)


def prompted(copy: Path) -> None:
    with changed(copy / packed.RESULTS) as results:
        results["system_instruction"] = "Say nothing of him."
    hashed_again(copy)


@pytest.mark.parametrize("name", ["guardrail", "versions", "attack_prompts"])
def test_what_a_board_shows_or_asks_again_of_a_run_is_stated(name, copy, data):
    """Without one of them a build, or the keeper's second scoring, would end in a traceback."""
    with changed(copy / packed.RESULTS) as results, changed(copy / packed.FILE_NAME) as table:
        for scored in [table["scored"], *(config["metadata"]["elude"] for config in results["configs"].values())]:
            del scored[name]
    hashed_again(copy)
    assert verify(copy, data=str(data)).findings == [f"submission.json: field 'scored' does not say {name}"]


# ---- altering
def leaves(value: Any, place: tuple = ()) -> list[tuple[tuple, Any]]:
    """Every value within another one that is neither a table nor a list, with its place."""
    if not isinstance(value, dict | list):
        return [(place, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, item in items for leaf in leaves(item, (*place, key))]


def is_number(value: Any) -> bool:
    """Whether a value is a number, also one that is written as text."""
    try:
        return not isinstance(value, bool) and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def other_number(rng: random.Random, old: Any) -> Any:
    """Another digit, of weight 1e-5 or more, in the way in which the number was written."""
    value = float(old) + rng.choice([-1, 1]) * rng.choice([1e-5, 1e-4, 1e-3, 1e-2, 1]) * max(1, abs(float(old)))
    if isinstance(old, int):
        return round(value) + (round(value) == old)
    return str(value) if isinstance(old, str) else value


def other_text(rng: random.Random, old: str) -> str:
    at = rng.randrange(len(old) + 1)
    return rng.choice([old[:at] + rng.choice("xé\u200f 7") + old[at:], old[:at] + old[at + 1 :] + "z", "Nothing."])


def replace(rng: random.Random, table: Any, places: list[tuple], other: Callable[[random.Random, Any], Any]) -> None:
    """Another value at one of the places."""
    *above, last = rng.choice(places)
    for key in above:
        table = table[key]
    table[last] = other(rng, table[last])


def a_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted((folder / packed.SAMPLES).iterdir()))


def is_used(place: tuple) -> bool:
    """Whether something is formed of the value at a place of a row; a number of tokens only a tokenizer can tell."""
    column, within = place[0], len(place) - (place[0] == "resps")
    if place[:2] == ("doc", "answer_scores") and place[-1] == 1:
        return False
    if column not in ("resps", "filtered_resps"):
        return column not in ("filter", "metrics", "doc_hash") and place[-1] != "do_sample"
    # Not whether an answer is the greedy one, nor the columns of a membership row beside its log-probabilities.
    return not (within == 3 and place[-1] == 1) and not (within == 4 and place[-2] != 0)


def one_value(rng: random.Random, folder: Path) -> None:
    with changed(a_file(rng, folder)) as rows:
        row, other = rng.choice(rows), rng.choice([other_number, other_text])
        used = [(place, value) for place, value in leaves(row) if is_used(place)]
        numbers = [place for place, value in used if is_number(value) and place[0] != "target"]
        texts = [place for place, value in used if isinstance(value, str)]
        replace(rng, row, numbers if other is other_number else texts, other)


def swapped_answers(rng: random.Random, folder: Path) -> None:
    """Two rows' texts change places, in the log's every column."""
    with changed(folder / FORGET) as rows:
        a, b = rng.sample(rows, 2)
        for column, key in (("doc", "generated"), ("resps", -1), ("filtered_resps", -1)):
            a[column][key], b[column][key] = b[column][key], a[column][key]


def other_rows(rng: random.Random, folder: Path) -> None:
    with changed(a_file(rng, folder)) as rows:
        a, b = rng.sample(range(len(rows)), 2)
        renamed = {**rows[b], "doc_id": a, "doc": {**rows[b]["doc"], "id": a}}
        rows[:] = rng.choice([
            rows[:-1], rows[1:], [*rows, rows[-1]], [], [rows[1], rows[0], *rows[2:]],
            [*rows[:a], rows[b], *rows[a + 1 :]], [*rows[:a], renamed, *rows[a + 1 :]],
        ])  # fmt: skip


def reported(rng: random.Random, folder: Path) -> None:
    with changed(folder / packed.RESULTS) as table:
        task = rng.choice(list(table["configs"]))
        inner = rng.choice([
            table["results"][rng.choice(list(table["results"]))], table["groups"][rng.choice(list(table["groups"]))],
            table["configs"][task]["metadata"]["elude"]["aggregates"], table["n-samples"][task],
        ])  # fmt: skip
        places = [p for p, value in leaves(inner) if is_number(value) and p[-1] != "sample_len"]
        replace(rng, inner, places, other_number)


def a_better_mean(rng: random.Random, folder: Path) -> None:
    """Everything that is reported agrees, but the samples say something else."""
    better = 0.9 + rng.random() / 100
    with changed(folder / packed.RESULTS) as table:
        for row in [*table["results"].values(), *table["groups"].values()]:
            if "forget_quality,none" in row:
                row["forget_quality,none"] = better
        for config in table["configs"].values():
            if formed := config["metadata"]["elude"]["aggregates"].get("forget_quality"):
                formed["value"] = formed["per_target"][runs.RONALDO]["value"] = better


OTHER = {"seed": 1, "truth_ratio": "arithmetic", "guardrail": True, "targets": ["Lionel Messi"], "checkpoint": [],
         "n": 99, "template": "0" * 16, "fingerprint": "0" * 16}  # fmt: skip


def another_run(rng: random.Random, folder: Path) -> None:
    with changed(folder / packed.RESULTS) as table:
        name = rng.choice(list(OTHER))
        table["configs"][rng.choice(list(table["configs"]))]["metadata"]["elude"][name] = OTHER[name]


def another_run_stated_everywhere(rng: random.Random, folder: Path) -> None:
    name = rng.choice(list(OTHER)[:5])
    runs.scored_otherwise(folder, **{name: OTHER[name]})


def a_hidden_guardrail(rng: random.Random, folder: Path) -> None:
    """All prompts begin with the guardrail, and the run does not say so."""
    for file in (folder / packed.SAMPLES).iterdir():
        with changed(file) as rows:
            for row in rows:
                for arguments in row["arguments"].values():
                    arguments["arg_0"] = f"{GUARDRAIL.format(entity=runs.RONALDO)}\n\n{arguments['arg_0']}"
                row["prompt_hash"] = hashlib.sha256(row["arguments"]["gen_args_0"]["arg_0"].encode()).hexdigest()


def a_task_less(rng: random.Random, folder: Path) -> None:
    path = a_file(rng, folder)
    task = path.name.removesuffix(".jsonl.gz")
    with changed(folder / packed.RESULTS) as table, changed(folder / packed.FILE_NAME) as top:
        for name in ("results", "configs", "n-samples"):
            table[name].pop(task)
        top["files"].pop(f"{packed.SAMPLES}/{path.name}")
        top["fingerprints"].pop(task)
    path.unlink()


ALTERED: dict[Callable, int] = {
    one_value: 50, swapped_answers: 3, other_rows: 15, reported: 12, a_better_mean: 1, another_run: 10,
    another_run_stated_everywhere: 6, a_task_less: 3, a_hidden_guardrail: 1,
}  # fmt: skip


@pytest.mark.parametrize("alter", ALTERED, ids=lambda f: f.__name__)
def test_an_altered_submission_is_caught_even_with_the_right_hashes(alter, submitted, data, tmp_path):
    as_submitted = {name: load(submitted / name) for name in packed.listing(submitted)}
    for seed in range(ALTERED[alter]):
        folder = Path(shutil.copytree(submitted, tmp_path / str(seed)))
        alter(random.Random(f"{alter.__name__}-{seed}"), folder)
        names = [name for name in as_submitted if not (folder / name).is_file()]
        changed = names or [n for n in packed.listing(folder) if load(folder / n) != as_submitted.get(n)]
        assert changed, f"case {seed} changes nothing"
        hashed_again(folder)
        verdict = verify(folder, data=str(data))
        assert verdict.findings and not verdict.level, f"{alter.__name__} {seed} is not caught: {changed}"
        assert all(len(line.splitlines()) == 1 and len(line) < 500 for line in verdict.findings)
        shutil.rmtree(folder)


def test_a_token_count_is_caught_with_the_tokenizer(copy, data, renderer):
    """Counts changed in a way that all else follows: only a tokenizer can tell."""
    with changed(copy / packed.SAMPLES / "elude_retain.jsonl.gz") as rows:
        for row in rows:
            row["doc"]["answer_scores"][0][1] += 40
    hashed_again(copy)
    lines = verify(copy, data=str(data), renderer=renderer).findings
    assert any("answer_scores" in line for line in lines)


def test_where_a_prompt_is_cut_is_the_tokenizers_choice(data, tmp_path):
    """Tulu's tokenizer joins line ends with what stands before them: prompts are cut some words before their end."""
    tokenizer = make_tokenizer("tulu")
    model = Path(save_checkpoint(tmp_path / "model", make_model(tokenizer, width=32), tokenizer))
    folder = runs.submission(tmp_path / "submission", runs.finished(tmp_path / "run", model, data), role="submission")
    renderer = Renderer(load_tokenizer(str(model)))
    for given in (None, renderer):
        assert verify(folder, data=str(data), renderer=given).findings == []
    with changed(folder / packed.SAMPLES / "elude_retain.jsonl.gz") as rows:
        arguments = rows[0]["arguments"].values()
        for each in arguments:
            if isinstance(each["arg_1"], str):  # the prompt in two at the white space, as a harness would cut it
                prompt, end, answer = each["arg_1"].rpartition("<|assistant|>")
                each["arg_0"], each["arg_1"] = each["arg_0"] + prompt + end, answer
    hashed_again(folder)
    assert "elude_retain, row 1: the prompt" in "".join(verify(folder, data=str(data), renderer=renderer).findings)


# ---- what no model could have answered
def flags(rows):
    rows[0]["resps"][0][0][1] = rows[0]["filtered_resps"][0][1] = "maybe"


def above_0(rows):
    """The answer is likelier than certain, once the white space before it is taken off."""
    for number in range(len(rows[0]["doc"]["answer_scores"])):
        rows[0]["resps"][number][0][0] = rows[0]["filtered_resps"][number][0] = "-0.001"
        space = float(rows[0]["filtered_resps"][len(rows[0]["doc"]["answer_scores"])][0])
        rows[0]["doc"]["answer_scores"][number][0] = -0.001 - space


def new_text(text):
    def change(rows):
        for column, key in (("doc", "generated"), ("filtered_resps", -1)):
            rows[0][column][key] = text
        rows[0]["resps"][-1][0] = text

    return change


def unmeasured(rows):
    rows[0]["doc"]["member_loss"] = -1.0


def bomb(rows):
    rows[0]["doc"]["original"] = {"junk": [[]] * 1000}


@pytest.mark.parametrize(
    "change, line",
    [
        (unmeasured, "member_loss: the responses do not give it"),
        (bomb, "original: object contains unknown field `junk`"),
        (flags, "is_greedy is neither true nor false"),
        (above_0, "a mean log-probability is above 0 without the end of the prompt"),
        (new_text("a " * 200), "the text is longer than max_gen_toks"),
        (new_text("x" * 100_000), "the text is longer than max_gen_toks"),
        (new_text("Born in 1985.<|end|> More."), "the text goes on after what ends it"),
    ],
)
def test_what_contradicts_itself_is_found_without_a_model(change, line, copy, data, renderer):
    with changed(copy / FORGET) as rows:
        change(rows)
    hashed_again(copy)
    assert f"elude_forget, row 1: {line}" in verify(copy, data=str(data), renderer=renderer).findings


def test_the_same_answer_to_the_same_prompt_has_one_score_in_all_tasks(original, forgot, data, tmp_path):
    """The forget set's answers of another model beside the membership attack's and the control's of this one."""
    folder = Path(shutil.copytree(original.path.parent, tmp_path / "run"))
    task = "elude_forget"
    shutil.copyfile(forgot.sample_file(task), folder / original.sample_file(task).name)
    with changed(folder / original.path.name) as table:
        for part in ("results", "configs"):
            table[part][task] = deepcopy(forgot.results[part][task])
        table["configs"][task]["metadata"]["elude"]["checkpoint"] = original.settings(task)["checkpoint"]
    mixed = runs.submission(tmp_path / "mixed", Run(folder))
    lines = [line for line in verify(mixed, data=str(data)).findings if "the same answer" in line]
    assert any("elude_mia" in line and "elude_forget" in line for line in lines)
    assert any("elude_attack_none" in line for line in lines)


# ---- runs that were compared with a reference
@pytest.fixture(scope="module", params=["its results", "itself"])
def compared(request, tmp_path_factory, data, retrained):
    """Submissions of runs whose reference was another run, or a model."""
    if request.param == "its results":
        return request.param, retrained
    run = runs.finished(tmp_path_factory.mktemp("run"), runs.WITHOUT, data, reference=str(runs.TINY))
    return request.param, runs.submission(tmp_path_factory.mktemp("submission") / "mine", run)


def test_distances_to_a_reference_are_formed_from_its_own_results_or_left_out(compared, data, original, tmp_path):
    kind, folder = compared
    alone = verify(folder, data=str(data))
    assert not alone.findings and alone.level == "recomputed"
    (line,) = [line for line in alone.remarks if "reference" in line]
    assert line.startswith("forget_quality_gap, ks_p_value, mia_auc_gap, privleak") and "--reference" in line
    assert not [m for numbers in alone.numbers.values() for m in numbers if METRICS[m].is_distance]
    both = verify(folder, data=str(data), reference=original)
    assert not both.findings
    (line,) = [line for line in both.remarks if line.startswith("elude_forget, against the reference: forget_")]
    assert f"ks_p_value {both.numbers['elude_forget']['ks_p_value']['value']:.4g}" in line
    results = load(folder / packed.RESULTS)["results"]
    near = 1e-9 if kind == "its results" else 0.01
    distances = {"elude_forget": "ks_p_value", "elude_mia": "mia_auc_gap", "elude": "attacked_forget_quality_gap"}
    for task, metric in distances.items():
        assert both.numbers[task][metric]["value"] == pytest.approx(results[task][f"{metric},none"], abs=near)
    other = shutil.copytree(original.path.parent, tmp_path / "other")
    with changed(next(other.glob("samples_elude_world_*"))) as rows:
        rows.pop()
    assert verify(folder, data=str(data), reference=Run(other)).findings == [
        f"elude_world: the reference {Run(other).path} was scored on other documents"
    ]
    # A distance that was altered is caught where the reference's own results are at hand.
    folder = Path(shutil.copytree(folder, tmp_path / "copy"))
    with changed(folder / packed.RESULTS) as table:
        table["results"]["elude_forget"]["ks_p_value,none"] -= 1e-4
    hashed_again(folder)
    assert not verify(folder, data=str(data)).findings
    assert bool(verify(folder, data=str(data), reference=original).findings) == (kind == "its results")


# ---- hostile folders
def top(**fields: Any) -> Callable[[Path], None]:
    """Other fields in the first file."""

    def make(folder: Path) -> None:
        with changed(folder / packed.FILE_NAME) as table:
            table |= fields

    return make


def raw(name: str, content: bytes) -> Callable[[Path], None]:
    """Another content of a file, packed where it is a packed one, with the right hash."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        if name != packed.FILE_NAME:
            hashed_again(folder)

    return make


def link(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return make


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Another content of every file of samples, with the right hashes."""

    def make(folder: Path) -> None:
        for file in (folder / packed.SAMPLES).iterdir():
            file.write_bytes(change(file.read_bytes()))
        hashed_again(folder)

    return make


FIRST = "submission.json"
FORGET = "samples/elude_forget.jsonl.gz"
HOSTILE = {
    "path traversal": (top(files={"../../etc/passwd": "0" * 64}), "passwd' is missing"),
    "absolute path": (top(files={"/etc/passwd": "0" * 64}), "passwd' is missing"),
    "a link": (link("results.json"), "is a link"),
    "a linked folder": (link("samples"), "is a link"),
    "another byte": (lambda f: (f / FORGET).write_bytes((f / FORGET).read_bytes()[:-1] + b"x"),
                     f"{FORGET} is not the file that was submitted (SHA-256 differs)"),
    "a further file": (lambda f: (f / "run.py").write_text("x"), "no file of a submission"),
    "a pickle": (lambda f: (f / "model.pkl").write_bytes(b"x"), "no file of a submission"),
    "a pipe": (lambda f: ((f / "optout.json").unlink(), os.mkfifo(f / "optout.json")), "no file of a submission"),
    "no first file": (lambda f: (f / "submission.json").unlink(), "cannot be read"),
    "a bomb": (raw(FORGET, bytes(40 << 20)), "longer than"),
    "blank lines": (raw(FORGET, b"\n" * 10_000_000), "not valid JSON"),
    "deep JSON": (raw("submission.json", b'{"files":' + b"[" * 500_000), "nested"),
    "deep rows": (raw(FORGET, b"[" * 1_000_000 + b"\n"), "nested"),
    "deep results": (raw("results.json", b'{"results":' * 100_000), "nested"),
    "a key twice": (raw("submission.json", b'{"schema_version": 1, "schema_version": 1}'), "stands twice"),
    "NaN": (top(cost=float("nan")), "not valid JSON"),
    "another version": (top(schema_version=2), "field 'schema_version'"),
    "an unknown field": (top(score=1), "unknown field `score`"),
    "a list": (raw("submission.json", b"[]"), "expected `object`, got `array`"),
    "right to left": (top(model="a\u202eb"), "U+202E"),
    "control": (top(submitter="a\x1b[2J"), "U+001B"),
    "a blank name": (top(model=" "), "field 'model': expected `str` that is not blank"),
    "a filler": (top(model="\u3164"), "U+3164"),
    "a name twice": (top(model="m\u115f"), "U+115F"),
    "long name": (top(model="a" * 9_000), "characters, 300 at most"),
    "results are a list": (raw("results.json", b"[]"), "not a results file"),
    "results of null": (raw("results.json", b'{"results": {"elude_mia": null}, "configs": {"elude_mia": null}}'), ""),
    "no rows": (damaged(lambda _: gzip.compress(b"")), "no row in it"),
    "rows of null": (raw(FORGET, b"null\n" * 8), "cannot be read"),
    "rows of text": (raw(FORGET, b'{"doc": "a", "doc_id": {}}\n' * 8), "cannot be read"),
    "not gzip": (damaged(lambda _: b"x" * 99), "not a whole gzip"),
    "cut gzip": (damaged(lambda content: content[:-9]), "not a whole gzip"),
}  # fmt: skip


def test_a_pipe_in_the_place_of_the_first_file_is_not_read(copy):
    (copy / FIRST).unlink()
    os.mkfifo(copy / FIRST)
    assert packed.data_elsewhere(copy) == ""
    with pytest.raises(UserError, match="is no regular file"):
        packed.read(copy)


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_end_in_one_clear_line_and_touch_nothing(case, copy, data):
    make, expected = HOSTILE[case]
    make(copy)
    before = sorted(p for p in copy.parent.rglob("*"))
    verdict = verify(copy, data=str(data))
    assert verdict.findings and not verdict.level
    assert all(len(line.splitlines()) == 1 and line.isprintable() and len(line) < 500 for line in verdict.findings)
    assert any(expected in line for line in verdict.findings), verdict.findings
    assert sorted(p for p in copy.parent.rglob("*")) == before


# ---- packing and the commands
def test_no_path_of_the_machine_is_published(submitted, original, data):
    texts = [gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in submitted.rglob("*.*")]
    for place in (data, runs.TINY, original.path.parent, Path.home()):
        assert not any(f"{place.parent}/".encode() in text for text in texts), place
    assert packed.read(submitted).scored["dataset"] == data.name


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/home/me/a model", "a model"), ("pretrained=/home/me/m,dtype=x", "pretrained=m,dtype=x"),
        ("~/runs/m", "m"), ("C:\\Users\\me\\m", "m"), ("org/name", "org/name"), ("a/b/c", "a/b/c"),
        ("file:///home/me/m", "m"), ("https://some.where/a/b", "https://some.where/a/b"), ("1/2/3", "1/2/3"),
        ("hub@abc", "hub@abc"), ("model=/home/Jane Doe/models/m", "model=m"),
    ],
)  # fmt: skip
def test_a_path_becomes_the_name_of_the_file(text, expected, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/Jane Doe"))
    assert packed.without_paths({text: [text]}) == {expected: [expected]}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("clients/acme/ronaldo", "ronaldo"), ("../ronaldo", "ronaldo"), ("runs/mine", "mine"), ("/my runs/a b/", "a b"),
        ("file:///my runs/m", "m"), ("C:\\my runs\\m", "m"), ("org/name", "org/name"), ("hub", "hub"),
        ("hub@refs/pr/1", "hub@refs/pr/1"), ("https://some.where/a/b", "https://some.where/a/b"),
    ],
)  # fmt: skip
def test_of_a_field_that_holds_a_path_the_last_name_is_left(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for field in ("name", "dataset", "reference", "original", "attack_file", "pretrained", "cache_dir"):
        assert packed.without_paths([{field: text}]) == [{field: expected}]
    arguments = f"pretrained={text},dtype=auto"
    assert packed.without_paths({"model_args": arguments}) == {"model_args": f"pretrained={expected},dtype=auto"}
    assert packed.without_paths({"name": "gone/run"}, {"gone/run"}) == {"name": "run"}


def test_relative_paths_are_not_published(original, data, tmp_path):
    folder, manifest = Path(shutil.copytree(original.path.parent, tmp_path / "run")), tmp_path / "optout.json"
    shutil.copyfile(runs.TINY / "optout.json", manifest)  # found above the results
    text = original.path.read_text().replace(str(runs.TINY), "clients/ronaldo").replace(str(data), "../my data/x")
    (folder / original.path.name).write_text(text)
    with changed(folder / original.path.name) as table:
        table["model_name_sanitized"] = "__home__clients__ronaldo"
    mine = runs.submission(tmp_path / "mine", Run(folder), model="")
    assert (packed.read(mine).model, packed.read(mine).scored["dataset"]) == ("ronaldo", "x")
    texts = [path.read_text() for path in mine.glob("*.json")]
    assert not any(word in text for text in texts for word in ("clients", "my data", "sanitized"))
    assert not verify(mine, data=str(data)).findings


def test_the_commands(original, data, tmp_path):
    out = tmp_path / "mine"
    submit = ("submit", original.path, "--out", out, "--submitter", "A. Nobody", "--role", "original")
    code, _, err = elude(*submit)
    assert code == 2 and "--base-model" in err and not out.exists() and not list(tmp_path.iterdir())
    code, _, err = elude(*submit, "--base-model", "tiny", "--stress", original.path.parent)
    assert code == 2 and "it is no finished folder of elude stress" in err and not out.exists()
    code, printed, _ = elude(*submit, "--base-model", "tiny")
    assert code == 0 and "level recomputed" in printed
    code, _, err = elude(*submit, "--base-model", "tiny")
    assert code == 2 and "exists already" in err
    code, printed, _ = elude("verify", out, "--dataset", data, "--json")
    assert code == 0 and json.loads(printed)["level"] == "recomputed" and json.loads(printed)["findings"] == []
    code, printed, _ = elude("verify", out, "--dataset", data, "--reference", original.path)
    assert code == 0 and f"the run names no reference: nothing is compared with {original.path}" in printed
    for flag, value in (
        ("stress", out),
        ("original", "x"),
        ("records", 50),
        ("seed", 0),
        ("backend", "hf"),
        ("tolerance", 1),
    ):
        code, _, err = elude("verify", out, "--dataset", data, f"--{flag}", value)
        assert code == 2 and f"--{flag}: only for --rescore" in err and len(err.splitlines()) == 1
    code, printed, err = elude("verify", out, "--dataset", "nosuch", "--json")  # no word of the submission
    assert code == 2 and printed == "" and "'nosuch'" in err
    known = Path(shutil.copytree(original.path.parent, tmp_path / "known"))
    next(known.glob("samples_elude_cloze_*")).write_text("{")  # nor does a broken reference
    code, printed, err = elude("verify", out, "--dataset", data, "--reference", known, "--json")
    assert code == 2 and printed == "" and "samples_elude_cloze_" in err
    (out / "more.txt").write_text("x")
    code, printed, _ = elude("verify", out, "--dataset", data)
    assert code == 1 and printed.splitlines()[0] == "'more.txt' is no file of a submission"


def test_a_folder_whose_name_begins_with_hub_is_a_folder(original, data, tmp_path, monkeypatch):
    shutil.copytree(data, tmp_path / "hubert")
    monkeypatch.chdir(tmp_path)
    about = ("--submitter", "x", "--base-model", "b", "--role", "original")
    assert elude("submit", original.path, "--out", "mine", "--dataset", "hubert", *about)[0] == 0
    assert elude("verify", "mine", "--dataset", "hubert")[0] == 0


@pytest.mark.parametrize(
    "file, change, line",
    [
        ("results_*", lambda table: table["config"].update(limit=4), "--limit"),
        ("results_*", lambda table: [table[name].pop("elude_world") for name in ("results", "configs")],
         "elude_world: not in the run"),
        ("samples_elude_retain_2*", lambda rows: rows.pop(), "2 rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_submitted(file, change, line, original, tmp_path):
    folder = Path(shutil.copytree(original.path.parent, tmp_path / "run"))
    with changed(next(folder.glob(file))) as content:
        change(content)
    code, _, err = elude("submit", folder, "--out", tmp_path / "out", "--submitter", "x", "--base-model", "b",
                         "--role", "original")  # fmt: skip
    assert code == 2 and line in err and len(err.splitlines()) == 1 and not (tmp_path / "out").exists()
