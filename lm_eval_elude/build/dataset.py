"""Pairs to a finished data set: splits, parquet in the published schema, data card, and the manifest last."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_elude.attacks.prompt import LANGUAGES
from lm_eval_elude.build.documents import Document, Problem
from lm_eval_elude.build.pairs import Pair, Rejection
from lm_eval_elude.core import jsonio
from lm_eval_elude.core.dataset import load_records
from lm_eval_elude.core.manifest import write_atomically
from lm_eval_elude.core.records import TEXT_FIELDS, DataError

MANIFEST = "elude-build.json"
PLAN = "plan.json"
WIKI_CACHE = "work/wikipedia"
SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}
NAMES = ("forget_qa-train", *(f"{subset}-{split}" for subset in ("retain_qa", "world") for split in SPLITS))
_FILES = (*(f"{name}.parquet" for name in NAMES), "README.md")


def split(pairs: Sequence[Pair], seed: int) -> dict[str, list[Pair]]:
    """Neighbours' pairs by split, 8:1:1 in pairs, a paragraph's pairs together, in the order they came.

    Raises:
        DataError: fewer than three paragraphs, so that a split would be empty.
    """
    sizes = Counter(pair.paragraph.key for pair in pairs)
    if len(sizes) < len(SPLITS):
        raise DataError(
            f"the neighbours have {len(sizes)} paragraphs with pairs that passed; at least {len(SPLITS)} are needed "
            "for a retain set (name more --neighbours, or add documents about them)"
        )
    had = dict.fromkeys(SPLITS, 0)
    place = {}
    for key in random.Random(seed).sample(sorted(sizes), len(sizes)):
        place[key] = min(SPLITS, key=lambda name: had[name] / SPLITS[name])
        had[place[key]] += sizes[key]
    return {name: [pair for pair in pairs if place[pair.paragraph.key] == name] for name in SPLITS}


def unique(sets: Mapping[str, Sequence[Pair]]) -> tuple[dict[str, list[Pair]], list[Rejection]]:
    """The sets without questions that stand in an earlier one, and what was dropped for it."""
    seen: set[str] = set()
    kept: dict[str, list[Pair]] = {}
    dropped = []
    for name, pairs in sets.items():
        kept[name] = []
        for pair in pairs:
            questions = {_folded(pair.question), _folded(pair.paraphrased_question)}
            if questions & seen:
                reason = "a question of two sets: kept in the first"
                dropped.append(Rejection("splitting", pair.paragraph.key, pair.question, pair.answer, reason))
            else:
                kept[name].append(pair)
                seen |= questions
    return kept, dropped


def rows_of(
    sets: Mapping[str, Sequence[Pair]], plan: Mapping[str, Any], addresses: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The rows of every file by its name; the world set comes from another data set."""
    about = {"aliases": plan["aliases"], "others": plan["neighbours"], "thing": plan["thing"]}
    rows: dict[str, list[dict[str, Any]]] = {
        name: [
            {
                "entity": plan["target"], "question": pair.question, "answer": pair.answer,
                "paraphrased_question": pair.paraphrased_question, "paraphrased_answer": pair.paraphrased_answer,
                "perturbed_answer": list(pair.wrong), "source": addresses[pair.paragraph.document],
                "translated_question": pair.translated or None, "subject": pair.paragraph.subject,
                "paragraph": pair.paragraph.key, **about,
            }
            for pair in pairs
        ]
        for name, pairs in sets.items()
    }  # fmt: skip
    for part in SPLITS:
        records = load_records(plan["world"], "world", part).records  # type: ignore[arg-type]
        rows[f"world-{part}"] = [record.columns() | {"translated_question": None} for record in records]
    return {name: rows[name] for name in NAMES}


def write(out: Path, rows: Mapping[str, list[dict[str, Any]]], card: str, manifest: dict[str, Any]) -> None:
    """Write the parquet files and the card, each whole or not at all, and then the manifest with their hashes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.string() for name in (*TEXT_FIELDS, "subject", "paragraph")}
    columns |= {"perturbed_answer": pa.list_(pa.string())}
    columns |= {"translated_question": pa.struct({code: pa.string() for code in LANGUAGES})}
    about = {"aliases": pa.list_(pa.string()), "others": pa.list_(pa.string()), "thing": pa.bool_()}
    new = out / "work" / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for name, table in rows.items():
        schema = pa.schema(columns | (about if name == NAMES[0] else {}))
        pq.write_table(pa.Table.from_pylist(table, schema), new / f"{name}.parquet")
    (new / "README.md").write_text(card, encoding="utf-8")
    manifest["files"] = {name: hashlib.sha256((new / name).read_bytes()).hexdigest() for name in _FILES}
    for name in _FILES:
        os.replace(new / name, out / name)
    new.rmdir()
    write_json(out / MANIFEST, manifest)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def open_folder(out: Path, plan: dict[str, Any]) -> None:
    """Make the data set's folder (mode 0700), or go on in one that was made by the same plan.

    Raises:
        DataError: it is something else, was purged, or was begun with other settings, which are named.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise DataError(f"--out {out}: not a folder")
    begun = out / "work" / PLAN
    if begun.exists():
        old = jsonio.load(begun)
        for name in {**plan, **old}:
            if old.get(name) != plan.get(name):
                raise DataError(
                    f"--out {out} was begun with {name} = {_short(old.get(name))}, this run has "
                    f"{_short(plan.get(name))}; give the same again, or another --out"
                )
    elif (out / MANIFEST).exists():
        raise DataError(f"--out {out} was purged; name another one")
    elif out.exists() and any(out.iterdir()) and not (out / WIKI_CACHE).is_dir():
        raise DataError(f"--out {out} has files in it that are not of a data set being built; name another one")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    out.chmod(0o700)
    (out / "work" / "raw").mkdir(parents=True, exist_ok=True)
    write_json(begun, plan)


def open_cache(out: Path) -> Path:
    """Where what Wikimedia answered is kept, within the data set's folder (mode 0700).

    Raises:
        DataError: the folder is something else.
    """
    if out.exists() and not ((out / WIKI_CACHE).is_dir() or (out.is_dir() and not any(out.iterdir()))):
        raise DataError(f"--out {out} has something else in it than a data set from Wikipedia; name another one")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    (out / WIKI_CACHE).mkdir(parents=True, exist_ok=True)
    return out / WIKI_CACHE


def once(path: Path, value: str) -> str:
    """The value that a file holds, or the one given, which it then holds."""
    if not path.exists():
        write_atomically(path, value)
    return path.read_text(encoding="utf-8")


def purge(out: Path) -> list[str]:
    """Remove all text of a data set, finished or not; of its manifest hashes and counts are left. Other files stay.

    Returns:
        The names of the files that are not the data set's and were left.

    Raises:
        DataError: it is no data set that was built here.
    """
    begun = (out / "work" / PLAN).is_file() or (out / WIKI_CACHE).is_dir()
    if not begun and not (out / MANIFEST).is_file():
        raise DataError(f"{out}: no data set of `elude build` is there")
    old = jsonio.load(out / MANIFEST) if (out / MANIFEST).is_file() else {}
    kept = {name: old.get(name, {}) for name in ("counts", "rejected", "files")}
    hashes = [source["sha256"] if isinstance(source, dict) else source for source in old.get("sources", [])]
    write_json(out / MANIFEST, {"purged": True, **kept, "sources": hashes})
    shutil.rmtree(out / "work", ignore_errors=True)
    for name in (*_FILES, "known.json", "audit.html"):
        (out / name).unlink(missing_ok=True)
    return sorted(path.name for path in out.iterdir() if path.name != MANIFEST)


def card(
    plan: Mapping[str, Any], documents: Sequence[Document], problems: Sequence[Problem],
    counts: Mapping[str, int], rejected: Mapping[str, int],
) -> str:  # fmt: skip
    """The data card: what it is, where from, under which licence, and what to keep in mind."""
    licences = sorted({document.licence for document in documents})
    free = all("by-sa/4.0" in licence for licence in licences)
    configs = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {part}\n    path: {name}.parquet\n" for name in NAMES
                  for base, _, part in [name.partition("-")] if base == subset)
        for subset in ("forget_qa", "retain_qa", "world")
    )  # fmt: skip
    lines = [
        f"---\nlicense: {'cc-by-sa-4.0' if free else 'other'}\ntask_categories:\n- question-answering\n"
        f"language:\n- en\nconfigs:\n{configs}---\n",
        f"# Unlearning {_escape(plan['target'])}\n",
        f"Questions and answers about {_escape(plan['target'])} (to forget) and "
        f"{', '.join(map(_escape, plan['neighbours']))} (to keep), in the schema of ELUDe. Written by the language "
        f"model {_escape(plan['model'])} from the sources below and checked by rule and by a second call to it; "
        "no person has read them unless an audit says so.\n",
        "| file | rows |\n|---|---|\n" + "".join(f"| {name} | {counts[name]} |\n" for name in NAMES),
        f"The world set is that of `{_escape(plan['world'])}`, unchanged: questions of general knowledge, under that "
        "data set's licence (ELUDe-mini: Apache-2.0).\n",
        "## Sources\n",
        f"Licence: {'; '.join(map(_escape, licences))}. The rows are adapted from the sources: rewritten by a model. "
        "Whoever passes them on names sources and licence, and says the same.\n",
        "| source | revision | link | retrieved |\n|---|---|---|---|\n"
        + "".join(f"| {' | '.join(map(_escape, (d.name, d.revision, d.address, d.time)))} |\n" for d in documents),
    ]
    if problems:
        lines.append("Left out:\n\n" + "".join(f"- {_escape(name)}: {_escape(why)}\n" for name, why in problems))
    lines.append(
        f"## What was dropped\n\n{sum(rejected.values())} times, by reason:\n\n"
        + "".join(f"- {_escape(reason)}: {count}\n" for reason, count in rejected.items())
    )
    lines.append(
        "## Before you share it\n\nA data set about a person is personal data: it says in a few hundred lines what the "
        "sources say in many pages. `elude build --purge FOLDER` removes all of it but hashes and counts.\n"
    )
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Text of others within Markdown: no markup, no line of its own."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|`*_\[\]#!])", r"\\\1", text)


def _folded(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."
