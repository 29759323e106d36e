"""Where the data lives: the published ELUDe, the bundled ELUDe-mini, or a folder or file in the same schema.

Layout of a folder (and of the Hub repository): ``forget_qa-train``, ``retain_qa-{train,validation,test}`` and
``world-{train,validation,test}`` with the ending ``.parquet``, ``.jsonl`` or ``.json``; the world set may also carry
its published name ``alpaca_gpt4_data_{split}.json``. A single file is taken as the forget set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lm_eval_elude.core.records import DataError, QARecord, entity_name, fingerprint, parse_record
from lm_eval_elude.core.targets import TARGETS, Target, resolve_target

Subset = Literal["forget", "retain", "world"]
Split = Literal["train", "validation", "test"]

MINI = Path(__file__).resolve().parents[1] / "mini" / "data"
HUB_REPOSITORY = "6rightjade/ELUDe"
# The world set is not on the Hub but in the authors' code repository; the commit is pinned.
HUB_WORLD_URL = "https://raw.githubusercontent.com/brightjade/Opt-Out/995babb/data/alpaca_gpt4_data_{split}.json"
# What the paper scores: the whole forget set, the test split of the others.
SCORED_SPLIT: dict[Subset, Split] = {"forget": "train", "retain": "test", "world": "test"}
_ENDINGS = (".parquet", ".jsonl", ".json")


class Selection(NamedTuple):
    """Records of one subset and split, and their :func:`~lm_eval_elude.core.records.fingerprint`."""

    records: tuple[QARecord, ...]
    fingerprint: str


def load_records(
    source: str, subset: Subset, split: Split, targets: Sequence[str] = (), *, scored: bool = False
) -> Selection:
    """Load one subset and split, keeping only the rows of ``targets``.

    Args:
        source: ``hub``, ``mini``, or a folder or file in the ELUDe schema.
        subset: the forget set, the neighbours' retain set, or the world set.
        split: ``train``, ``validation`` or ``test``; the forget set only has ``train``.
        targets: display names; none keeps every row. The world set belongs to no target.
        scored: whether every row must have a paraphrase and five perturbed answers.

    Raises:
        DataError: the source or a field is missing, or no row is left of the subset or of a target.
    """
    wanted = tuple(targets) if subset != "world" else ()
    selection = _load(source, subset, split, wanted, scored, _stamp(source))
    found = {record.entity for record in selection.records}
    missing = [target for target in wanted if target not in found]
    if missing or not selection.records:
        of = f" of {', '.join(missing)}" if missing else ""
        raise DataError(f"data set {source!r} has no {subset} {split} rows{of}")
    return selection


def entities(source: str) -> list[str]:
    """Display names of the targets that a source has forget records of, in the order they stand there."""
    if source == "hub":
        return [target.name for target in TARGETS]
    rows, where = _rows(source, "forget", "train")
    names = [entity_name(str(row.get("entity") or "")) for row in rows]
    if not any(names):
        raise DataError(f"{where}: column 'entity' is missing")
    return list(dict.fromkeys(name for name in names if name))


def resolve_targets(source: str, names: Iterable[str]) -> list[Target]:
    """The targets a user means among those of a source (see :func:`resolve_target`), without repeats."""
    known = entities(source)
    return list(dict.fromkeys(resolve_target(name, known) for name in names))


def _stamp(source: str) -> tuple[Any, ...]:
    """What a remembered selection depends on besides its name: where the source lies and when its files changed."""
    if source == "hub":
        return os.environ.get("ELUDE_HUB_REPOSITORY"), os.environ.get("ELUDE_WORLD_URL")
    root = (MINI if source == "mini" else Path(source).expanduser()).resolve()
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    return root, *((f, f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())


@lru_cache(maxsize=64)
def _load(
    source: str, subset: Subset, split: Split, targets: tuple[str, ...], scored: bool, stamp: tuple[Any, ...]
) -> Selection:
    rows, where = _rows(source, subset, split)
    records = []
    for number, row in enumerate(rows, 1):
        if targets and not isinstance(row.get("entity"), str):
            raise DataError(f"{where}, row {number}: field 'entity' is missing")
        # Other targets' rows are passed over before validation: 106k rows then load in seconds.
        if not targets or entity_name(row["entity"]) in targets:
            records.append(parse_record(row, f"{where}, row {number}", scored=scored))
    return Selection(tuple(records), fingerprint(records))


def _rows(source: str, subset: Subset, split: Split) -> tuple[list[dict[str, Any]], str]:
    """All rows of a subset and split, and how to call the file in an error."""
    if source == "hub":
        return _hub_rows(subset, split)
    root = MINI if source == "mini" else Path(source).expanduser()
    if not root.exists():
        raise DataError(f"data set {source!r} is neither 'hub', 'mini' nor an existing folder or file")
    if root.is_file():
        if subset != "forget":
            raise DataError(f"data set {source!r} is one file, the forget set; a folder is needed for the {subset} set")
        return _read(root), root.name
    stems = [f"world-{split}", f"alpaca_gpt4_data_{split}"] if subset == "world" else [f"{subset}_qa-{split}"]
    for path in (root / f"{stem}{ending}" for stem in stems for ending in _ENDINGS):
        if path.is_file():
            return _read(path), path.name
    raise DataError(f"data set {source!r} has no {' or '.join(stems)} ({', '.join(_ENDINGS)})")


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        try:
            return pq.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not a readable parquet file ({error})") from None
    if path.suffix not in _ENDINGS:
        raise DataError(f"{path}: unknown ending {path.suffix!r}, expected one of {', '.join(_ENDINGS)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as UTF-8 text ({error})") from None
    if path.suffix == ".json":
        rows = _parse(text, str(path))
        if not isinstance(rows, list):
            raise DataError(f"{path}: a JSON list of rows is expected, got {type(rows).__name__}")
    else:
        # Not splitlines(): texts may hold other line separators (U+2028). Rows are counted without blank lines.
        lines = filter(str.strip, text.split("\n"))
        rows = [_parse(line, f"{path.name}, row {number}") for number, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path.name}, row {number}: an object is expected, got {type(row).__name__}")
    return rows


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from None


def _hub_rows(subset: Subset, split: Split) -> tuple[list[dict[str, Any]], str]:
    import datasets

    repository = os.environ.get("ELUDE_HUB_REPOSITORY", HUB_REPOSITORY)
    world = os.environ.get("ELUDE_WORLD_URL", HUB_WORLD_URL)
    try:
        if subset == "world":
            name = world.format(split=split)
            table = datasets.load_dataset("json", data_files=name, split="train")
        else:
            name = f"{repository}, {subset}_qa, {split}"
            table = datasets.load_dataset(repository, f"{subset}_qa", split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"data set 'hub' cannot be read ({name}: {reason}); give --dataset mini or a folder to stay off-line"
        ) from None
    return table.with_format("arrow")[:].to_pylist(), name
