"""A data set's folder: create, resume, fill (parquet in ELUDe's schema, card, manifest last), and purge."""

from __future__ import annotations

import hashlib
import io
import random
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lm_eval_elude import __version__
from lm_eval_elude.attacks.prompt import LANGUAGES
from lm_eval_elude.curate.checks import is_named
from lm_eval_elude.curate.documents import MARK
from lm_eval_elude.curate.duplicates import question_key
from lm_eval_elude.curate.pairs import Pair, Rejection, rejection
from lm_eval_elude.curate.readers import READERS
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.data.files import lock, sha256, write_bytes, write_text
from lm_eval_elude.errors import UserError

MANIFEST = "elude-build.json"
PLAN = "work/plan.json"
WIKI_CACHE = "work/wikipedia"
PERIOD = f"{WIKI_CACHE}/period"
AUDIT_PAGE, AUDIT_MARK = "audit.html", "elude-audit-1"  # the page's file, and what it and its exports are known by
SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}
NAMES = ("forget_qa-train", *(f"{subset}-{split}" for subset in ("retain_qa", "world") for split in SPLITS))
CARD = "README.md"
FILES = (*(f"{name}.parquet" for name in NAMES), CARD)
JOURNAL = "work/journal.jsonl"
_WORK = re.compile(
    rf"{MARK}|{re.escape(PLAN)}|{PERIOD}|{WIKI_CACHE}/[0-9a-f]{{32}}\.json|{re.escape(JOURNAL)}\.lock"
    r"|work/(?:sources|paragraphs|journal|rejected|pairs)\.jsonl"
    rf"|work/raw/[0-9a-f]{{64}}(?:{'|'.join(map(re.escape, READERS))})"
)


class Plan(msgspec.Struct):
    """What a build is asked for; the same command has the same plan, and only then goes on."""

    target: str
    aliases: list[str]
    neighbours: list[str]
    model: str
    pairs: int
    seed: int
    world: str
    translate: bool
    thing: bool
    paragraphs: str
    documents: dict[str, str]


class _Source(msgspec.Struct):
    sha256: str
    licence: str = ""


class Manifest(msgspec.Struct):
    """What is read of a data set's manifest; a purged one has only hashes as sources."""

    files: dict[str, str] = {}
    counts: dict[str, int] = {}
    rejected: dict[str, int] = {}
    sources: list[_Source | str] = []
    usage: dict[str, int] = {}
    version: str = ""

    @property
    def licences(self) -> set[str]:
        """Those of the documents, as the card has them."""
        return {getattr(source, "licence", "") for source in self.sources}


def begin(out: Path) -> None:
    """Make a data set's folder (mode 0700), or go on in one that was begun here.

    UserError where it is something else, or was purged.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out {out}: not a folder")
    if not _is_ours(out):
        if (out / MANIFEST).exists():
            raise UserError(f"--out {out} was purged; name another one")
        if any(path.is_symlink() or not path.is_dir() for path in out.rglob("*")):  # folders are what a kill may leave
            raise UserError(f"--out {out} has files in it that are not of a data set being built; name another one")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    out.chmod(0o700)
    for name in ("work/raw", WIKI_CACHE):
        (out / name).mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


# Command-line names of the settings of a plan, where they differ.
_FLAGS = {"target": "TARGET", "aliases": "--alias", "model": "--llm-model", "translate": "translations"}


def keep_plan(out: Path, plan: Plan) -> None:
    """Write down what is asked for; UserError where it was begun with other settings, which are named."""
    if (path := out / PLAN).exists():
        begun = jsonio.read(path, Plan)
        if differ := _difference(begun, plan):
            raise UserError(f"--out {out} was begun with {differ}; give the same again, or another --out")
    jsonio.write(path, msgspec.structs.asdict(plan))


def _difference(begun: Plan, plan: Plan) -> str:
    """What two plans differ in first; "" where they are the same."""
    differ = [name for name in Plan.__struct_fields__ if getattr(begun, name) != getattr(plan, name)]
    # Other documents may bring other names with them, and both of them other paragraphs.
    brought = {"documents", "paragraphs"} | ({"aliases", "neighbours"} if "documents" in differ else set())
    if given := [name for name in differ if name not in brought]:
        before, now = (reprlib.repr(getattr(each, given[0])) for each in (begun, plan))
        return f"{_FLAGS.get(given[0], f'--{given[0]}')} {before}, this run has {now}"
    if "documents" in differ:
        changed = dict.fromkeys(name for name, _ in sorted(begun.documents.items() ^ plan.documents.items()))
        others = " or --neighbours" if "neighbours" in differ else ""
        return f"other documents{others} (changed, added or removed: {', '.join([*changed][:3])})"
    return "other paragraphs of these documents (--paragraphs, or another version of elude cut them)" if differ else ""


def keep_period(out: Path, given: str | None, default: str) -> str:
    """The months that a build was begun with; else those given or the default, which are then kept.

    UserError where others are given than it was begun with.
    """
    if not (path := out / PERIOD).exists():
        write_text(path, given or default)
    kept = path.read_text(encoding="utf-8")
    if given not in (None, kept):
        raise UserError(f"--period {given}: --out {out} was begun with {kept}; give that again, or another --out")
    return kept


def read_manifest(out: Path) -> Manifest | None:
    """The manifest of a data set, None where it is not finished."""
    if not (path := out / MANIFEST).is_file():
        return None
    return jsonio.read(path, Manifest)


def finished(out: Path) -> Manifest | None:
    """The manifest of a data set that this version has finished and that has all of its files.

    UserError where a file is not as it was left: somebody's edit is not to be lost.
    """
    if not (manifest := read_manifest(out)) or not (manifest.files and manifest.version):  # purged
        return None
    there = {name: digest for name, digest in manifest.files.items() if (out / name).is_file()}
    if changed := [name for name, digest in there.items() if sha256(out / name) != digest]:
        raise UserError(
            f"--out {out}: {changed[0]} was changed since it was built; move it away, or name another --out"
        )
    return manifest if manifest.version == __version__ and len(there) == len(manifest.files) else None


def write_card(out: Path, card: str, sources: Sequence[Mapping[str, Any]]) -> None:
    """Another card for a finished data set, whose documents have another licence."""
    manifest = jsonio.read(out / MANIFEST, dict[str, Any])
    (out / MANIFEST).unlink()  # after a kill the set is built again, from the journal
    write_text(out / CARD, card)
    jsonio.write_lines(out / "work/sources.jsonl", sources)
    files = manifest["files"] | {CARD: sha256(out / CARD)}
    jsonio.write(out / MANIFEST, manifest | {"sources": sources, "files": files})


def split(pairs: Sequence[Pair], seed: int) -> dict[str, list[Pair]]:
    """Neighbours' pairs by split, 8:1:1 in pairs, a paragraph's pairs together, in the order they came.

    UserError for fewer than three paragraphs, so that a split would be empty.
    """
    sizes = Counter(pair.paragraph.key for pair in pairs)
    if len(sizes) < len(SPLITS):
        raise UserError(
            f"the neighbours have {len(sizes)} paragraphs with pairs that passed; at least {len(SPLITS)} are needed "
            "for a retain set (name more --neighbours, or add documents about them)"
        )
    filled = dict.fromkeys(SPLITS, 0)
    place = {}
    for key in random.Random(seed).sample(sorted(sizes), len(sizes)):
        place[key] = min(SPLITS, key=lambda name: filled[name] / SPLITS[name])
        filled[place[key]] += sizes[key]
    return {name: [pair for pair in pairs if place[pair.paragraph.key] == name] for name in SPLITS}


def unique(sets: Mapping[str, Sequence[Pair]]) -> tuple[dict[str, list[Pair]], list[Rejection]]:
    """The sets without questions that stand earlier, in them or in another one, and what was dropped for it."""
    seen: set[str] = set()
    kept: dict[str, list[Pair]] = {}
    dropped = []
    for name, pairs in sets.items():
        kept[name] = []
        for pair in pairs:
            questions = {question_key(pair.question), question_key(pair.paraphrased_question)}
            if questions & seen:
                dropped.append(rejection("splitting", pair, "a question that stands twice: kept in the first place"))
            else:
                kept[name].append(pair)
                seen |= questions
    return kept, dropped


def world_rows(source: str, called: Sequence[str] = ()) -> tuple[dict[str, list[dict[str, Any]]], list[Rejection]]:
    """The rows of the world set's files, by their names, as another data set has them, but those that name the target.

    ``called`` is all that the target is called. UserError where there is no world set, or it cannot be read.
    """
    rows, named = {}, []
    for part in SPLITS:
        try:
            records = load_records(source, "world", part).records  # type: ignore[arg-type]
        except UserError as error:
            raise UserError(f"--world: {error}") from None
        kept = []
        for record in records:
            texts = (record.question, record.answer, record.paraphrased_question, record.paraphrased_answer)
            if called and any(is_named(called, text, ()) for text in (*texts, *record.perturbed_answer)):
                reason = "a row of the world set names the target"
                named.append(Rejection("world set", part, record.question, record.answer, reason))
            else:
                kept.append(record.columns() | {"translated_question": None})
        rows[f"world-{part}"] = kept
    return rows, named


def rows_of(
    sets: Mapping[str, Sequence[Pair]], plan: Plan, addresses: Mapping[str, str],
    world: Mapping[str, list[dict[str, Any]]],
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """The rows of every file by its name; ``world`` are the world set's."""
    rows = {
        name: [
            {
                "entity": plan.target, "question": pair.question, "answer": pair.answer,
                "paraphrased_question": pair.paraphrased_question, "paraphrased_answer": pair.paraphrased_answer,
                "perturbed_answer": list(pair.wrong), "source": addresses[pair.paragraph.document],
                "translated_question": pair.translated or None, "subject": pair.paragraph.subject,
                "paragraph": pair.paragraph.key,
                "aliases": plan.aliases, "others": plan.neighbours, "thing": plan.thing,
            }
            for pair in pairs
        ]
        for name, pairs in sets.items()
    } | dict(world)  # fmt: skip
    return {name: rows[name] for name in NAMES}


def write(out: Path, rows: Mapping[str, list[dict[str, Any]]], card: str, manifest: dict[str, Any]) -> None:
    """Write the parquet files and the card, each whole or not at all, and then the manifest with their hashes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        name: pa.string()
        for name in (
            "entity",
            "question",
            "answer",
            "paraphrased_question",
            "paraphrased_answer",
            "source",
            "subject",
            "paragraph",
        )
    }
    columns |= {"perturbed_answer": pa.list_(pa.string())}
    columns |= {"translated_question": pa.struct({code: pa.string() for code in LANGUAGES})}
    about = {"aliases": pa.list_(pa.string()), "others": pa.list_(pa.string()), "thing": pa.bool_()}
    contents = {}
    for name, table in rows.items():
        schema = pa.schema(columns | (about if name == NAMES[0] else {}))
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(table, schema), sink)
        contents[f"{name}.parquet"] = sink.getvalue()
    contents[CARD] = card.encode()
    (out / MANIFEST).unlink(missing_ok=True)  # a kill leaves no set whose files are another's
    for name, content in contents.items():
        write_bytes(out / name, content)
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    jsonio.write(out / MANIFEST, manifest | {"files": files})


def purge(out: Path) -> list[str]:
    """Remove the files of a data set, finished or not; of its manifest hashes and counts are left.

    A file goes where the manifest lists it with its hash, where its name and place in ``work`` are what a build gives,
    and where it is an audit page. Links are not followed. Everything else stays. Returns the names of all that is left
    besides the manifest, the data set's own or not.

    UserError where it is no data set that was built here, or one that is being built.
    """
    if out.is_symlink() or not (_is_ours(out) or (out / MANIFEST).is_file()):
        raise UserError(f"{out}: no data set of `elude build` is there")
    if (out / "work").is_dir():
        with lock(out / JOURNAL, f"{out}: `elude build` is at work there; stop it first"):
            pass
    manifest = read_manifest(out)
    left = []
    # The mark goes last: a purge that was killed can be gone on with.
    for path in sorted(out.rglob("*"), key=lambda path: path == out / MARK):
        name = path.relative_to(out).as_posix()
        if not path.is_symlink() and path.is_file() and _is_listed(path, name, manifest):
            if path.stat().st_nlink > 1:
                left.append(f"{name} (removed here, but the file has another name elsewhere)")
            with suppress(OSError):
                path.unlink()
    for name in ("work/raw", WIKI_CACHE, "work"):
        with suppress(OSError):  # something is left in it
            (out / name).rmdir()
    manifest = manifest or Manifest()
    jsonio.write(out / MANIFEST, {
        "purged": True, "counts": manifest.counts, "rejected": manifest.rejected, "files": manifest.files,
        "sources": [source if isinstance(source, str) else source.sha256 for source in manifest.sources],
    })  # fmt: skip
    return left + sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path != out / MANIFEST)


def _is_ours(out: Path) -> bool:
    return (out / MARK).is_file() or (out / PLAN).is_file()


def _is_listed(path: Path, name: str, manifest: Manifest | None) -> bool:
    """Whether a regular file is one that a build (or an audit) wrote."""
    if name in FILES:
        return manifest is None or manifest.files.get(name) == sha256(path)
    if name == AUDIT_PAGE:
        return AUDIT_MARK.encode() in path.read_bytes()
    return _WORK.fullmatch(name) is not None
