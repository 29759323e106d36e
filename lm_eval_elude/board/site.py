"""A static leaderboard from a folder of submissions: one table for what can be compared, nothing unchanged done again.

``SITE/data/DIGEST.json`` holds what was formed of a submission, ``SITE/submissions/DIGEST.html`` its report; both are
made once for a submission's content. Tables, scores and ranks are formed anew each time, which takes no samples.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lm_eval_elude import __version__
from lm_eval_elude.board import score as scores
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.score import Score
from lm_eval_elude.board.submission import Packed, Submission, shown
from lm_eval_elude.board.verify import LEVELS, Level, Verdict, verify
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import write_text
from lm_eval_elude.errors import UserError
from lm_eval_elude.report.comparison import NamedRun
from lm_eval_elude.report.page import render
from lm_eval_elude.report.page.page import write_report
from lm_eval_elude.scoring.metrics import METRICS
from lm_eval_elude.text.chat import Renderer, load_tokenizer

PAGE = Path(__file__).with_name("page")
STARTER = Path(__file__).with_name("starter")
FILES = "leaderboard-files.json"  # names of a site's files that builds wrote; no other file is replaced or removed
_NAMES = re.compile(r"index\.html|leaderboard\.json|data/[0-9a-f]{64}\.json|submissions/[0-9a-f]{64}\.html")


class Built(NamedTuple):
    """What a build did: submissions in tables, formed anew, and refused with the reason of each."""

    rows: int
    formed: int
    refused: dict[str, str]


class Table(msgspec.Struct, frozen=True, order=True):
    """What must be the same for rows to be compared."""

    base_model: str
    data: str
    seed: int
    targets: tuple[str, ...]
    truth_ratio: str
    version: str


class Kept(msgspec.Struct, frozen=True):
    """``data/DIGEST.json``: what was formed of a submission; ``stamp`` says with which software and settings."""

    stamp: str
    table: Table
    remarks: list[str]
    columns: scores.Columns
    measured: scores.Measured


class Entry(NamedTuple):
    """A submission that stands in a table."""

    digest: str
    folder: str
    level: str
    submission: Submission
    kept: Kept


class Shown(Packed):
    """A submission's run as its report shows it: what its checkpoint is called here is nobody's business."""

    def __init__(self, folder: Path, verdict: Verdict) -> None:
        super().__init__(folder)
        self._samples, self.numbers, self._docs = verdict.samples, verdict.numbers, verdict.docs

    def settings(self, task: str) -> dict[str, Any]:
        return {**super().settings(task), "checkpoint": []}

    def rows(self, task: str) -> list[dict[str, Any]]:
        return [{"doc": doc} for doc in self._docs[task]]


def build(folder: Path, site: Path, *, data: str = "", tokenizer: str = "") -> Built:
    """Make or renew the site.

    Args:
        folder: of submissions, one folder each (in it or in ``submissions/``), and verdicts in ``verdicts/``.
        site: the folder of the site.
        data: the data set of all, where it is a path.
        tokenizer: of the models (folder or Hub id), for prompts and token counts.

    Raises:
        UserError: there is no submission, or a file at ``site`` that no build wrote stands where one is needed.
    """
    places = [place for place in (folder, folder / "submissions") if place.is_dir()]
    # What a command is still writing has a name that begins with a dot.
    folders = sorted(p.parent for place in places for p in place.glob(f"[!.]*/{packed.FILE_NAME}") if p.is_file())
    if not folders:
        raise UserError(f"{folder}: no submission in it (a folder with {packed.FILE_NAME})")
    levels = _levels(folder / "verdicts")
    digests = {place: packed.digest(place) for place in folders}
    names = {"index.html", "leaderboard.json"}
    names |= {name for digest in digests.values() for name in (f"data/{digest}.json", f"submissions/{digest}.html")}
    written = _claim(site, names)
    renderer = _renderer(tokenizer)
    stamp = f"{__version__} {data} {renderer.fingerprint if renderer else ''}"
    kept_files = {place: site / "data" / f"{digest}.json" for place, digest in digests.items()}
    formed: dict[Path, Kept | str] = {
        place: known for place, file in kept_files.items() if (known := _known(place, file, stamp))
    }
    todo = [place for place in folders if place not in formed]
    form = partial(_form, site=site, stamp=stamp, data=data, tokenizer=tokenizer)
    workers = min(os.cpu_count() or 1, len(todo))
    if workers > 1 and len(todo) > 4:
        # Rows are large and have no cycles: what looks for some takes a tenth of the time.
        with ProcessPoolExecutor(workers, initializer=partial(gc.set_threshold, 1_000_000)) as pool:
            formed |= dict(zip(todo, pool.map(form, todo, chunksize=4), strict=True))
    else:
        formed |= {place: form(place) for place in todo}
    entries: dict[str, Entry] = {}
    for place, kept in sorted(formed.items()):
        if isinstance(kept, Kept):
            digest = digests[place]
            entries[digest] = Entry(digest, place.name, levels.get(digest, LEVELS[0]), packed.read(place), kept)
    _write(site, _tables(entries.values()))
    for name in written - names:
        (site / name).unlink(missing_ok=True)
    write_text(site / FILES, json.dumps(sorted(names)))
    return Built(len(entries), len(todo), {p.name: kept for p, kept in formed.items() if isinstance(kept, str)})


def start(folder: Path) -> list[Path]:
    """Write what a repository that takes submissions needs; files that are there stay.

    Returns:
        The files written.
    """
    written = []
    for source in sorted(p for p in STARTER.rglob("*") if p.is_file()):
        file = folder / source.relative_to(STARTER)
        if not os.path.lexists(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, source.read_text(encoding="utf-8").replace("VERSION", __version__))
            written.append(file)
    for name in ("submissions", "verdicts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / ".gitkeep").touch()
    return written


# ---- one submission
def _known(folder: Path, file: Path, stamp: str) -> Kept | None:
    """What was formed of a submission before, if all its files are still the same."""
    try:
        kept = packed.load(Kept, file, nan=True)
        packed.check_files(folder, packed.read(folder).files)
    except (UserError, OSError):  # not formed yet, or kept no longer as it was written
        return None
    return kept if kept.stamp == stamp else None


def _form(folder: Path, site: Path, stamp: str, data: str, tokenizer: str) -> Kept | str:
    """Verify a submission, write its report, and keep what tables need; of one that fails, its first finding."""
    verdict = verify(folder, data=data, renderer=_renderer(tokenizer))
    if verdict.findings or verdict.submission is None:
        return verdict.findings[0]
    try:
        seed = int(verdict.submission.scored["seed"])
        texts = [doc["generated"] for doc in verdict.docs["elude_forget"]]
        measured = scores.measure(verdict.samples, texts, seed)
        kept = Kept(stamp, _table(verdict.submission), verdict.remarks, scores.columns(verdict.numbers), measured)
        run = NamedRun(verdict.submission.model, Shown(folder, verdict))
        write_report([run], site / "submissions" / f"{verdict.digest}.html")
    except Exception as error:  # one submission never stops a build
        return f"cannot be shown ({type(error).__name__}: {shown(str(error))})"
    write_text(site / "data" / f"{verdict.digest}.json", json.dumps(msgspec.to_builtins(kept), ensure_ascii=False))
    return kept


def _table(submission: Submission) -> Table:
    scored, fingerprints = submission.scored, sorted(submission.fingerprints.items())
    table = {name: scored[name] for name in ("seed", "truth_ratio")} | {
        "base_model": submission.base_model,
        "data": scored["data"].get("repository") or Path(str(scored["dataset"])).name,
        "targets": sorted(scored["targets"]),
        "version": hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()[:12],
    }
    checked: Table = jsonio.check(table, Table, packed.FILE_NAME)
    return checked


@lru_cache(maxsize=1)
def _renderer(tokenizer: str) -> Renderer | None:
    return Renderer(load_tokenizer(tokenizer)) if tokenizer else None


class KeptVerdict(msgspec.Struct, frozen=True):
    """``verdicts/NAME.json``, as ``elude verify --rescore --json`` prints it."""

    digest: str
    level: Level
    findings: list[str]


def _levels(folder: Path) -> dict[str, Level]:
    """Levels of proof that the board's keepers found by scoring again, by digest."""
    levels = {}
    for file in sorted(folder.glob("*.json")):
        verdict = packed.load(KeptVerdict, file)
        if verdict.findings:
            raise UserError(f"{file}: not a verdict of `elude verify --json` that found nothing wrong")
        levels[verdict.digest] = verdict.level
    return levels


# ---- tables
def _tables(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Rows by table, best first; reference rows below, not ranked."""
    tables = []
    for table, members in groupby(sorted(entries, key=attrgetter("kept.table")), attrgetter("kept.table")):
        group = list(members)
        retrained = [entry.kept.measured for entry in group if entry.submission.role == "retrained"]
        reference = retrained[0] if retrained else None
        scored = [(entry, scores.score(entry.kept.measured, reference)) for entry in group]
        ranked = [pair for pair in scored if pair[0].submission.role == "submission"]
        ranked.sort(key=lambda pair: (-pair[1].value, pair[0].digest))
        others = [pair for pair in scored if pair not in ranked]
        others.sort(key=lambda pair: (pair[0].submission.role, pair[0].digest))
        ranks = scores.ranks([score for _, score in ranked])
        rows = [_row(e, s, rank, ranks.count(rank) > 1) for (e, s), rank in zip(ranked, ranks, strict=True)]
        rows += [_row(entry, score, None, False) for entry, score in others]
        about = msgspec.to_builtins(table)
        identity = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        tables.append(about | {"reference": bool(retrained), "rows": rows, "id": identity})
    return tables


def _row(entry: Entry, score: Score, rank: int | None, tied: bool) -> dict[str, Any]:
    """A row of ``leaderboard.json`` and of the page."""
    about = msgspec.to_builtins(entry.submission)
    scored = about["scored"]
    names = ("model", "base_model", "method", "role", "submitter", "hardware", "trained_on", "cost", "revision")
    return {
        "digest": entry.digest, "name": entry.folder, "level": entry.level,
        "remarks": entry.kept.remarks, **{name: about[name] for name in names},
        "method": entry.submission.method + " + guardrail" * bool(scored["guardrail"]),
        "versions": scored["versions"], "weights": about["weights"] or {},
        **msgspec.to_builtins(entry.kept.columns), "score": score._asdict(), "rank": rank, "tied": tied,
    }  # fmt: skip


# ---- files
def _claim(site: Path, names: Iterable[str]) -> set[str]:
    """Names of the site's files that earlier builds wrote; from now on those of this one are among them.

    Raises:
        UserError: a file that no build wrote has one of the names.
    """
    (site / "data").mkdir(parents=True, exist_ok=True)
    (site / "submissions").mkdir(exist_ok=True)
    file = site / FILES
    written = set(packed.load(list[str], file)) if os.path.lexists(file) else set()
    if odd := [name for name in written if not _NAMES.fullmatch(name)]:
        raise UserError(f"{file}: {shown(odd[0])} is no file of a leaderboard")
    if foreign := sorted(name for name in names if name not in written and os.path.lexists(site / name)):
        raise UserError(f"--out {site}: {foreign[0]} was not written by a build; name another folder, or take it away")
    write_text(file, json.dumps(sorted(written.union(names))))
    return written


def _write(site: Path, tables: list[dict[str, Any]]) -> None:
    about = (PAGE / "score.txt").read_text(encoding="utf-8")
    board = jsonio.finite({"version": __version__, "score": about, "tables": tables})
    write_text(site / "leaderboard.json", json.dumps(board, ensure_ascii=False) + "\n")
    page = render(
        PAGE / "board.html.j2", {"percent": _percent}, tables=board["tables"], levels=LEVELS, version=__version__,
        about=about, metrics=METRICS,
    )  # fmt: skip
    write_text(site / "index.html", page)


def _percent(value: float | None, places: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{places}f}"
