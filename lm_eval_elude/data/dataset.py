"""The data sets of ELUDe: the published one, the bundled ELUDe-mini, or a folder or file in the same schema.

A folder (and the Hub repository) holds ``forget_qa-train``, ``retain_qa-{train,validation,test}`` and
``world-{train,validation,test}`` with the ending ``.parquet``, ``.jsonl`` or ``.json``; the world set may also carry
its published name ``alpaca_gpt4_data_{split}.json``. A single file is taken as the forget set. ``hub@REVISION`` is the
Hub's data at a branch, tag or commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lm_eval_elude.data import bundled
from lm_eval_elude.data.files import Stamp, stamp
from lm_eval_elude.data.hub import HubData
from lm_eval_elude.data.records import COLUMNS, QARecord, entity_name, fingerprint, parse_record
from lm_eval_elude.data.rows import find, read_rows
from lm_eval_elude.data.sets import SETS, Split, Subset
from lm_eval_elude.data.targets import TARGETS, Target, resolve_target
from lm_eval_elude.errors import UserError

HUB = HubData(
    "hub", "6rightjade/ELUDe", "forget_qa-train.parquet", "ELUDE_HUB_REPOSITORY", "--dataset mini or a folder"
)
# The world set is not on the Hub but in the authors' code repository; the commit is pinned.
HUB_WORLD_URL = (
    "https://raw.githubusercontent.com/brightjade/Opt-Out/995babb243c1673d1fff96d0a8a32b236e85c450/data/"
    "alpaca_gpt4_data_{split}.json"
)


class Selection(NamedTuple):
    """Records of one subset and split in the order of the file, and their fingerprint."""

    records: tuple[QARecord, ...]
    fingerprint: str


def load_records(source: str, subset: Subset, split: Split, targets: Sequence[str] = ()) -> Selection:
    """Load one subset and split, keeping only the rows of ``targets``; every row without them, and of the world set.

    UserError where the source is missing, a row is not as the schema says (file, row and field are named), or no row is
    left of the subset or of a target.
    """
    wanted = tuple(targets) if SETS[subset].of_target else ()
    path = _file(source, subset, split)
    selection = _select(path, stamp(path), SETS[subset].of_target, wanted)
    missing = [target for target in wanted if target not in {record.entity for record in selection.records}]
    if missing or not selection.records:
        of = f" of {', '.join(missing)}" if missing else ""
        raise UserError(f"data set {source!r} has no {subset} {split} rows{of}")
    return selection


def has(source: str, subset: Subset, split: Split) -> bool:
    """Whether a source has a file of a subset and split, whatever is in it."""
    with suppress(UserError):
        return _file(source, subset, split).is_file()
    return False


def entities(source: str) -> list[str]:
    """Display names of the targets that a source has forget records of, in the order they stand there."""
    return [target.name for target in targets_of(source)]


def resolve_targets(source: str, names: Iterable[str]) -> list[Target]:
    """The targets a user means among those of a source (see :func:`resolve_target`), without repeats."""
    known = targets_of(source)
    return list(dict.fromkeys(resolve_target(name, known) for name in names))


def targets_of(source: str) -> list[Target]:
    """The targets of a source, with what its rows say of them; UserError where it cannot be read or names none."""
    if HUB.revision(source) is not None:
        return list(TARGETS)
    path = _file(source, "forget", "train")
    if not (targets := _targets(path, stamp(path))):
        raise UserError(f"{path.name}: column 'entity', whom a row is about, is missing")
    return list(targets)


def describe(source: str) -> dict[str, str]:
    """Where a source's rows come from, for results and manifests: as :meth:`HubData.describe`, and for the Hub's data
    the address of the ``world`` set.
    """
    return HUB.describe(source) | ({} if HUB.revision(source) is None else {"world": _world_address()})


@lru_cache(maxsize=16)
def _targets(path: Path, stamp: Stamp) -> tuple[Target, ...]:
    published = {target.name: target for target in TARGETS}
    targets: dict[str, Target] = {}
    for _, row in read_rows(path, ["entity", "aliases", "others", "thing"]):
        name = entity_name(str(row.get("entity") or ""))
        if name and name not in targets:
            own = Target(
                name, tuple(row.get("aliases") or ()), row.get("thing") is True, tuple(row.get("others") or ())
            )
            targets[name] = own if "others" in row else published.get(name, own)  # `elude build` says it of its target
    return tuple(targets.values())


@lru_cache(maxsize=64)
def _select(path: Path, stamp: Stamp, of_target: bool, targets: tuple[str, ...]) -> Selection:
    records = []
    for where, row in read_rows(path, COLUMNS):
        if not of_target:  # else each entity of the world set would count as one more target
            row["entity"] = ""
        if not targets or entity_name(str(row.get("entity") or "")) in targets:
            records.append(parse_record(row, where))
    return Selection(tuple(records), fingerprint(records))


def _file(source: str, subset: Subset, split: Split) -> Path:
    """The file that holds a subset and split, downloaded if it must be."""
    revision = HUB.revision(source)
    if revision is not None and subset == "world":  # not on the Hub
        address = _world_address().replace("{split}", split)
        return HUB.download(address) if "://" in address else Path(address)
    if revision is not None and not os.path.isdir(HUB.repository):
        return HUB.file(f"{subset}_qa-{split}.parquet", revision)
    root = (
        bundled.DATA if source == "mini" else Path(os.path.expanduser(source if revision is None else HUB.repository))
    )
    if root.is_file() and subset == "forget":
        return root
    if root.is_file():
        raise UserError(f"data set {source!r} is one file, the forget set; a folder is needed for the {subset} set")
    if not source or not root.is_dir():
        raise UserError(f"data set {source!r} is neither 'hub', 'mini' nor an existing folder or file")
    return find(root, [stem.format(split=split) for stem in SETS[subset].stems])


def _world_address() -> str:
    """Address of the world set (or a path), with ``{split}``."""
    return os.environ.get("ELUDE_WORLD_URL") or HUB_WORLD_URL
