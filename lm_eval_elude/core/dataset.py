"""Where the data lives: the published ELUDe, the bundled ELUDe-mini, or a folder or file in the same schema.

Layout of a folder (and of the Hub repository): ``forget_qa-train``, ``retain_qa-{train,validation,test}`` and
``world-{train,validation,test}`` with the ending ``.parquet``, ``.jsonl`` or ``.json``; the world set may also carry
its published name ``alpaca_gpt4_data_{split}.json``. A single file is taken as the forget set. Of the Hub's data
``hub@REVISION`` is the state of a branch, tag or commit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude.core import jsonio
from lm_eval_elude.core.records import (
    TEXT_FIELDS,
    DataError,
    QARecord,
    entity_name,
    fingerprint,
    given,
    parse_record,
    reason,
)
from lm_eval_elude.core.sets import SETS, Split, Subset
from lm_eval_elude.core.targets import TARGETS, Target, resolve_target

MINI = Path(__file__).resolve().parents[1] / "mini" / "data"
HUB_REPOSITORY = "6rightjade/ELUDe"
# The world set is not on the Hub but in the authors' code repository; the commit is pinned.
HUB_WORLD_URL = (
    "https://raw.githubusercontent.com/brightjade/Opt-Out/995babb243c1673d1fff96d0a8a32b236e85c450/data/"
    "alpaca_gpt4_data_{split}.json"
)
_ENDINGS = (".parquet", ".jsonl", ".json")
_COLUMNS = (*TEXT_FIELDS, "input", "perturbed_answer", "translated_question")
Row = tuple[str, dict[str, Any]]  # how to call it in an error, and its columns
_ABOUT = {"aliases", "others", "thing"}  # what a forget row may say of its target
_TRAINED = ("entity", "question", "input", "answer")  # the columns that a loss reads


class Selection(NamedTuple):
    """Records of one subset and split.

    Attributes:
        records: in the order of the file.
        fingerprint: see :func:`~lm_eval_elude.core.records.fingerprint`.
        odd: what is wrong with each row that could not be used as it is; only where ``strict`` is off.
    """

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
    """Load one subset and split, keeping only the rows of ``targets``.

    Args:
        source: ``hub``, ``hub@REVISION``, ``mini``, or a folder or file in the ELUDe schema.
        subset: the forget set, the neighbours' retain set, or the world set.
        split: ``train``, ``validation`` or ``test``; the forget set only has ``train``.
        targets: display names; none keeps every row. The world set belongs to no target.
        scored: whether every row must have a paraphrase and five perturbed answers.
        strict: whether one odd row refuses the set. Otherwise a row is left out if what a loss reads is odd, and used
            without its other columns if those are; either way it is in ``odd``.

    Raises:
        DataError: the source or a field is missing, or no row is left of the subset or of a target.
    """
    wanted = tuple(targets) if SETS[subset].of_target else ()
    selection = _load(source, subset, split, wanted, scored, strict, _stamp(source))
    found = {record.entity for record in selection.records}
    missing = [target for target in wanted if target not in found]
    if missing or not selection.records:
        of = f" of {', '.join(missing)}" if missing else ""
        odd = f" ({selection.remark})" if selection.odd else ""
        raise DataError(f"data set {source!r} has no {subset} {split} rows{of}{odd}")
    return selection


def entities(source: str) -> list[str]:
    """Display names of the targets that a source has forget records of, in the order they stand there."""
    return [target.name for target in _targets(source)]


def resolve_targets(source: str, names: Iterable[str]) -> list[Target]:
    """The targets a user means among those of a source (see :func:`resolve_target`), without repeats."""
    known = _targets(source)
    return list(dict.fromkeys(resolve_target(name, known) for name in names))


def _targets(source: str) -> list[Target]:
    """The targets of a source, with what its rows say of them beside the name (`elude build` writes that)."""
    if _revision(source) is not None:
        return list(TARGETS)
    path, _ = _file(source, "forget", "train")
    known = {target.name: target for target in TARGETS}
    found: dict[str, Target] = {}
    for _, row in read_rows(path, columns=["entity", *_ABOUT]):
        name = entity_name(entity) if isinstance(entity := row.get("entity"), str) else ""
        if name and row.keys() >= _ABOUT:
            aliases, others = _names(row["aliases"]), _names(row["others"])
            found.setdefault(name, Target(name, aliases, row["thing"] is True, others))
        elif name:
            found.setdefault(name, known.get(name, Target(name)))
    if not found:
        raise DataError(f"{path.name}: column 'entity' is missing")
    return list(found.values())


def _names(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else []
    return tuple(" ".join(text.split()) for text in texts if isinstance(text, str) and text.strip())


def describe(source: str) -> dict[str, str]:
    """Where a source's rows come from, for results and manifests: of the Hub's data the commit that is read.

    Returns:
        ``dataset``; for the Hub also ``repository``, ``revision`` (the commit; not where a folder stands in for the
        repository) and ``world`` (address of the world set).

    Raises:
        DataError: the Hub cannot be reached, and nothing of it is in the cache.
    """
    revision = _revision(source)
    if revision is None:
        return {"dataset": source}
    repository, world = _hub()
    commit = {} if os.path.isdir(repository) else {"revision": hub_commit(repository, revision)}
    return {"dataset": source, "repository": repository, **commit, "world": world}


def read_rows(path: Path, *, columns: Collection[str] | None = None, name: str = "") -> list[Row]:
    """The rows of a ``.parquet``, ``.jsonl`` or ``.json`` file of any columns, each with how to call it in an error.

    Args:
        path: the file.
        columns: those to read of a parquet file, where it has them; all without it.
        name: how to call the file, if not by its own name.

    Raises:
        DataError: not readable, or not a list of objects.
    """
    name = name or path.name
    ending = Path(name).suffix.lower()
    if ending not in _ENDINGS:
        raise DataError(f"{path}: unknown ending {ending!r}, expected one of {', '.join(_ENDINGS)}")
    if ending == ".jsonl":
        rows = list(jsonio.lines(path, nan=True))
    else:
        table = _parquet(path, columns) if ending == ".parquet" else jsonio.load(path, nan=True)
        if not isinstance(table, list):
            raise DataError(f"{path}: a JSON list of rows is expected, got {type(table).__name__}")
        rows = [(f"{name}, row {number}", row) for number, row in enumerate(table, 1)]
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{where}: an object is expected, got {type(row).__name__}")
    return rows


def _stamp(source: str) -> tuple[Any, ...]:
    """What a remembered selection depends on besides its name: where the source lies and when its files changed."""
    if _revision(source) is not None:
        repository, world = _hub()
        roots = [Path(repository), Path(world).parent]
    else:
        repository, world, roots = "", "", [_folder(source)]
    files = [file for root in roots for file in (sorted(root.iterdir()) if root.is_dir() else [root])]
    stats = ((file.resolve(), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file())
    return repository, world, *stats


@lru_cache(maxsize=64)
def _load(
    source: str, subset: Subset, split: Split, targets: tuple[str, ...], scored: bool, strict: bool, _: tuple[Any, ...]
) -> Selection:
    records, odd = [], []
    path, name = _file(source, subset, split)
    for where, row in read_rows(path, columns=_COLUMNS, name=name):
        entity = row.get("entity")
        # Other targets' rows are passed over before validation: 106k rows then load in seconds.
        if targets and isinstance(entity, str) and entity_name(entity) not in targets:
            continue
        try:
            if targets and not isinstance(entity, str):
                raise DataError(f"{where}: field 'entity' must be text, got {given(entity)}")
            records.append(parse_record(row, where, scored=scored))
        except DataError as error:
            if strict:
                raise
            odd.append(str(error))
            with suppress(DataError):
                if not targets or isinstance(entity, str):
                    records.append(parse_record({name: row.get(name) for name in _TRAINED}, where))
    return Selection(tuple(records), fingerprint(records), tuple(odd))


def _file(source: str, subset: Subset, split: Split) -> tuple[Path, str]:
    """The file that holds a subset and split, downloaded if it must be, and its name."""
    if (revision := _revision(source)) is not None:
        return _hub_file(subset, split, revision)
    root = _folder(source)
    if root.is_dir():
        return _member(root, subset, split, source)
    if subset != "forget":
        raise DataError(f"data set {source!r} is one file, the forget set; a folder is needed for the {subset} set")
    return root, root.name


def _member(root: Path, subset: Subset, split: Split, source: str) -> tuple[Path, str]:
    stems = [stem.format(split=split) for stem in SETS[subset].stems]
    found = {path.stem + path.suffix.lower(): path for path in sorted(root.iterdir()) if path.is_file()}
    for name in (f"{stem}{ending}" for stem in stems for ending in _ENDINGS):
        if name in found:
            return found[name], found[name].name
    raise DataError(f"data set {source!r} has no {' or '.join(stems)} ({', '.join(_ENDINGS)})")


def _folder(source: str) -> Path:
    """The folder or file that a source other than the Hub names."""
    if source == "mini":
        return MINI
    try:
        path = Path(source).expanduser()
        if path.is_dir() or path.is_file():  # a pipe would be waited for
            return path
    except (OSError, ValueError, RuntimeError):  # too long, not readable, or a home that nobody has
        pass
    shown = source if len(source) < 200 else f"{source[:200]}..."
    raise DataError(f"data set {shown!r} is neither 'hub', 'mini' nor an existing folder or file")


def _parquet(path: Path, columns: Collection[str] | None) -> list[dict[str, Any]]:
    """Only the columns that are asked for are decoded: others may hold what pyarrow cannot turn into Python values."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    size = 0
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if columns is None or name in columns]
            if len(set(names)) < len(names):
                raise DataError(f"{path}: a column stands twice")
            for batch in file.iter_batches(batch_size=1024, columns=names):
                size += batch.nbytes
                if size > jsonio.MAX_BYTES:
                    raise DataError(f"{path}: longer than {jsonio.MAX_BYTES:,} bytes")
                rows += batch.to_pylist()
    except DataError:
        raise
    except Exception as error:  # what a file holds can fail in any of pyarrow's conversions
        raise DataError(f"{path}: not a readable parquet file ({reason(error)})") from None
    return rows


# ---- the Hub
def _revision(source: str) -> str | None:
    """What a source asks of the Hub's data: "" for its newest state; None for a source that is not the Hub."""
    hub, at, revision = source.partition("@")
    return None if hub != "hub" or (at and not revision) else revision


def _hub() -> tuple[str, str]:
    """Repository (or a folder that stands in for it) and address of the world set (or a path), with ``{split}``."""
    return os.environ.get("ELUDE_HUB_REPOSITORY") or HUB_REPOSITORY, os.environ.get("ELUDE_WORLD_URL") or HUB_WORLD_URL


def _hub_file(subset: Subset, split: Split, revision: str) -> tuple[Path, str]:
    repository, world = _hub()
    if not SETS[subset].of_target:  # the world set is not on the Hub
        address = world.replace("{split}", split)
        return _download(address) if "://" in address else Path(address), address.rpartition("/")[2]
    if os.path.isdir(repository):
        if revision:
            raise DataError(f"data set 'hub@{revision}': ELUDE_HUB_REPOSITORY is a folder, which has no revisions")
        return _member(Path(repository), subset, split, repository)
    name = f"{subset}_qa-{split}.parquet"
    return hub_file(repository, name, hub_commit(repository, revision)), name


@lru_cache(maxsize=8)
def hub_commit(repository: str, revision: str) -> str:
    """The commit that a branch or tag is at; asked once, so that a run reads one state.

    The cache keeps a file under ``snapshots/COMMIT/``.
    """
    return hub_file(repository, "README.md", revision).parent.name


def hub_file(repository: str, name: str, revision: str, kind: str = "hub") -> Path:
    """A file of a data repository, from the cache where the Hub cannot be reached.

    Raises:
        DataError: it cannot be had.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision or None))
    except Exception as error:  # of the Hub's client, its HTTP library or the disk
        raise _unreachable(f"{repository}, {name}{f', {revision}' if revision else ''}", error, kind) from None


def _download(address: str) -> Path:
    """The world set, which stands at a pinned address: once downloaded it is not asked for again."""
    import datasets

    config = datasets.DownloadConfig(use_etag=False, disable_tqdm=not sys.stderr.isatty())
    try:
        return Path(datasets.DownloadManager(download_config=config).download(address))
    except Exception as error:  # of whichever library serves the address
        raise _unreachable(address, error) from None


# What takes the place of each data set off-line.
INSTEAD = {"hub": "--dataset mini or a folder", "tofu": "--dataset (tofu_data in --metadata) a folder of TOFU's files"}


def _unreachable(name: str, error: Exception, kind: str = "hub") -> DataError:
    return DataError(
        f"data set {kind!r} cannot be read ({name}: {reason(error)}); give {INSTEAD[kind]} to stay off-line"
    )
