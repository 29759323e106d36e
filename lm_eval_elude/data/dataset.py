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
from typing import Any, NamedTuple

from lm_eval_elude.data import bundled
from lm_eval_elude.data.files import Stamp, stamp
from lm_eval_elude.data.hub import HubData, download
from lm_eval_elude.data.records import TEXT_FIELDS, QARecord, entity_name, fingerprint, parse_record
from lm_eval_elude.data.rows import ENDINGS, read_rows
from lm_eval_elude.data.sets import SETS, Split, Subset
from lm_eval_elude.data.targets import TARGETS, Target, resolve_target
from lm_eval_elude.errors import UserError, given, reason

HUB = HubData(
    "hub", "6rightjade/ELUDe", "forget_qa-train.parquet", "ELUDE_HUB_REPOSITORY", "--dataset mini or a folder"
)
# The world set is not on the Hub but in the authors' code repository; the commit is pinned.
HUB_WORLD_URL = (
    "https://raw.githubusercontent.com/brightjade/Opt-Out/995babb243c1673d1fff96d0a8a32b236e85c450/data/"
    "alpaca_gpt4_data_{split}.json"
)
_COLUMNS = (*TEXT_FIELDS, "input", "perturbed_answer", "translated_question")
_ABOUT_TARGET = {"aliases", "others", "thing"}  # what a forget row of `elude build` says of its target
_TRAINED = ("entity", "question", "input", "answer")  # the columns that a loss reads


class Selection(NamedTuple):
    """Records of one subset and split in the order of the file, and what is wrong with each odd row."""

    records: tuple[QARecord, ...]
    fingerprint: str
    odd: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        """One line about the odd rows: how many, and the first of them."""
        more = "; ..." if len(self.odd) > 3 else ""
        rows = f"{len(self.odd)} odd row{'s' * (len(self.odd) > 1)}"
        return f"{rows}, left out or used without what is odd: {'; '.join(self.odd[:3])}{more}"


def load_records(
    source: str, subset: Subset, split: Split, targets: Sequence[str] = (), *, scored: bool = False, strict: bool = True
) -> Selection:
    """Load one subset and split, keeping only the rows of ``targets``; every row without them, and of the world set.

    With ``scored`` every row must have a paraphrase and five perturbed answers. With ``strict`` one odd row refuses the
    set. Otherwise a row is left out if what a loss reads is odd, and used without its other columns if those are;
    either way it is in ``odd``. UserError where the source or a field is missing, or no row is left of the subset or of
    a target.
    """
    wanted = tuple(targets) if SETS[subset].of_target else ()
    path, name = _file(source, subset, split)
    selection = _select(path, name, stamp(path), SETS[subset].of_target, wanted, scored, strict)
    missing = [target for target in wanted if target not in {record.entity for record in selection.records}]
    if missing or not selection.records:
        of = f" of {', '.join(missing)}" if missing else ""
        odd = f" ({selection.remark})" if selection.odd else ""
        raise UserError(f"data set {source!r} has no {subset} {split} rows{of}{odd}")
    return selection


def has(source: str, subset: Subset, split: Split) -> bool:
    """Whether a source has a file of a subset and split, whatever is in it."""
    with suppress(UserError):
        return _file(source, subset, split)[0].is_file()
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
    path, name = _file(source, "forget", "train")
    targets = list(_targets(path, name, stamp(path)))
    if not targets:
        raise UserError(f"{path.name}: column 'entity' is missing")
    return targets


def describe(source: str) -> dict[str, str]:
    """Where a source's rows come from, for results and manifests: as :meth:`HubData.describe`, and for the Hub's data
    the address of the ``world`` set.
    """
    return HUB.describe(source) | ({} if HUB.revision(source) is None else {"world": _world_address()})


@lru_cache(maxsize=16)
def _targets(path: Path, name: str, stamp: Stamp) -> tuple[Target, ...]:
    published = {target.name: target for target in TARGETS}
    targets: dict[str, Target] = {}
    for _, row in read_rows(path, columns=["entity", *_ABOUT_TARGET], name=name):
        entity = _entity(row)
        if entity and row.keys() >= _ABOUT_TARGET:
            aliases, others = _names(row["aliases"]), _names(row["others"])
            targets.setdefault(entity, Target(entity, aliases, row["thing"] is True, others))
        elif entity:
            targets.setdefault(entity, published.get(entity, Target(entity)))
    return tuple(targets.values())


@lru_cache(maxsize=64)
def _select(
    path: Path, name: str, stamp: Stamp, of_target: bool, targets: tuple[str, ...], scored: bool, strict: bool
) -> Selection:
    records, odd = [], []
    spellings = {target.casefold(): target for target in targets}
    for where, row in read_rows(path, columns=_COLUMNS, name=name):
        if not of_target:  # else each entity of the world set would count as one more target
            row["entity"] = ""
        entity = _entity(row)
        meant = spellings.get(entity.casefold()) if entity else None
        if targets and entity is not None and not meant:
            continue
        try:
            if targets and entity is None:
                raise UserError(f"{where}: field 'entity' must be text, got {given(row.get('entity'))}")
            if meant and entity not in targets:  # a fact of the target's, which would be left in the model
                raise UserError(f"{where}: field 'entity': {given(entity)} is {meant!r} in another case: spell it so")
            records.append(parse_record(row, where, scored=scored))
        except UserError as error:
            if strict:
                raise
            odd.append(str(error))
            with suppress(UserError):
                if not targets or entity in targets:
                    records.append(parse_record({column: row.get(column) for column in _TRAINED}, where))
    return Selection(tuple(records), fingerprint(records), tuple(odd))


def _entity(row: dict[str, Any]) -> str | None:
    """The name that a row's column says, None where it holds no text."""
    entity = row.get("entity")
    return entity_name(entity) if isinstance(entity, str) else None


def _names(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else []
    return tuple(" ".join(text.split()) for text in texts if isinstance(text, str) and text.strip())


def _file(source: str, subset: Subset, split: Split) -> tuple[Path, str]:
    """The file that holds a subset and split, downloaded if it must be, and its name (a cache may use another)."""
    revision = HUB.revision(source)
    if revision is not None and not SETS[subset].of_target:  # the world set is not on the Hub
        address = _world_address().replace("{split}", split)
        return download(address, HUB) if "://" in address else Path(address), address.rpartition("/")[2]
    if revision is not None and not os.path.isdir(HUB.repository):
        name = f"{subset}_qa-{split}.parquet"
        return HUB.file(name, revision), name
    if revision:
        raise UserError(f"data set {source!r}: {HUB.variable} is a folder, which has no revisions")
    root = _root(source) if revision is None else Path(HUB.repository)
    path = _member(root, subset, split) if root.is_dir() else root
    if path == root and subset != "forget":
        raise UserError(f"data set {source!r} is one file, the forget set; a folder is needed for the {subset} set")
    return path, path.name


def _root(source: str) -> Path:
    """The folder or file that a source other than the Hub names."""
    if source == "mini":
        return bundled.DATA
    with suppress(OSError, ValueError):  # too long, or not readable
        path = Path(os.path.expanduser(source))
        if source and (path.is_dir() or path.is_file()):  # a pipe would be waited for
            return path
    shown = source if len(source) < 200 else f"{source[:200]}..."
    raise UserError(f"data set {shown!r} is neither 'hub', 'mini' nor an existing folder or file")


def _member(root: Path, subset: Subset, split: Split) -> Path:
    stems = [stem.format(split=split) for stem in SETS[subset].stems]
    try:
        files = {path.stem + path.suffix.lower(): path for path in sorted(root.iterdir()) if path.is_file()}
    except OSError as error:
        raise UserError(f"data set {str(root)!r} cannot be read ({reason(error)})") from None
    for stem in stems:
        found = [files[name] for name in (f"{stem}{ending}" for ending in ENDINGS) if name in files]
        if len(found) > 1:
            raise UserError(
                f"data set {str(root)!r} has both {found[0].name} and {found[1].name}: move away what is old"
            )
        if found:
            return found[0]
    raise UserError(f"data set {str(root)!r} has no {' or '.join(stems)} ({', '.join(ENDINGS)})")


def _world_address() -> str:
    """Address of the world set (or a path), with ``{split}``."""
    return os.environ.get("ELUDE_WORLD_URL") or HUB_WORLD_URL
