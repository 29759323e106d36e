"""A static leaderboard from a folder of submissions: one table for what can be compared, nothing unchanged done again.

``SITE/data/DIGEST.json`` holds what was formed of a submission, ``SITE/submissions/DIGEST.html`` its report; both are
made once for a submission's content. Tables, scores and ranks are formed anew each time, which takes no samples.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_elude import __version__
from lm_eval_elude.board import score as scores
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.score import Measured, Score
from lm_eval_elude.board.submission import Packed, Submission
from lm_eval_elude.board.verify import LEVELS, Verdict, verify
from lm_eval_elude.core import jsonio
from lm_eval_elude.core.chat import Renderer, load_tokenizer
from lm_eval_elude.core.manifest import write_atomically
from lm_eval_elude.core.records import DataError
from lm_eval_elude.results.comparison import NamedRun
from lm_eval_elude.results.page import render
from lm_eval_elude.results.page.page import write_report

PAGE = Path(__file__).with_name("page")
STARTER = Path(__file__).with_name("starter")
FORM = 1  # of what is kept of a submission: another number forms all of them again
_CHANGES = 200  # that the feed has


class Built(NamedTuple):
    """What a build did: submissions in tables, formed anew, and refused with the reason of each."""

    rows: int
    formed: int
    refused: dict[str, str]


class Shown(Packed):
    """A submission's run as its report shows it: what its checkpoint is called here is nobody's business."""

    def __init__(self, folder: Path, verdict: Verdict) -> None:
        super().__init__(folder)
        self._samples, self.numbers, self._docs = verdict.samples, verdict.numbers, verdict.docs

    def settings(self, task: str) -> dict[str, Any]:
        return {**super().settings(task), "checkpoint": []}

    def rows(self, task: str) -> list[dict[str, Any]]:
        return [{"doc": doc} for doc in self._docs[task]]


def build(folder: Path, site: Path, *, data: str = "", tokenizer: str = "", processes: int = 0) -> Built:
    """Make or renew the site.

    Args:
        folder: of submissions, one folder each (in it or in ``submissions/``), and verdicts in ``verdicts/``.
        site: the folder of the site.
        data: the data set of all, where it is a path.
        tokenizer: of the models (folder or Hub id), for prompts and token counts.
        processes: that form submissions at once, by default one for each core.

    Raises:
        DataError: there is no submission.
    """
    places = [folder, folder / "submissions"]
    folders = sorted(
        p for place in places if place.is_dir() for p in place.iterdir() if (p / packed.FILE_NAME).is_file()
    )
    if not folders:
        raise DataError(f"{folder}: no submission in it (a folder with {packed.FILE_NAME})")
    for name in ("data", "submissions"):
        (site / name).mkdir(parents=True, exist_ok=True)
    stamp = f"{FORM} {__version__} {data} {_fingerprint(tokenizer)}"
    found: dict[Path, dict[str, Any]] = {}
    todo = []
    for one in folders:
        known = _known(one, site, stamp)
        found |= {one: known} if known else {}
        todo += [] if known else [one]
    form = partial(_form, site=site, stamp=stamp, data=data, tokenizer=tokenizer)
    workers = min(processes or os.cpu_count() or 1, len(todo))
    if workers > 1 and len(todo) > 4:
        # Rows are large and have no cycles: what looks for some takes a tenth of the time.
        with ProcessPoolExecutor(workers, initializer=partial(gc.set_threshold, 1_000_000)) as pool:
            found |= dict(zip(todo, pool.map(form, todo, chunksize=4), strict=True))
    else:
        found |= {one: form(one) for one in todo}
    refused = {one.name: entry["findings"][0] for one, entry in found.items() if entry["findings"]}
    good = {entry["digest"]: entry for one, entry in sorted(found.items()) if not entry["findings"]}
    verdicts = _verdicts(folder / "verdicts")
    for digest, entry in good.items():
        if entry["level"] == "recomputed" and digest in verdicts:
            entry["level"] = verdicts[digest]
    tables = _tables(list(good.values()))
    _write(site, tables, _changes(site, good))
    for kept, ending in ((site / "data", "json"), (site / "submissions", "html")):
        for file in kept.glob(f"*.{ending}"):
            if file.stem not in good and file.stem not in {e["digest"] for e in found.values()}:
                file.unlink()
    return Built(len(good), len(todo), refused)


def start(folder: Path) -> list[Path]:
    """Write what a repository that takes submissions needs; files that are there stay.

    Returns:
        The files written.
    """
    written = []
    for source in sorted(p for p in STARTER.rglob("*") if p.is_file()):
        file = folder / source.relative_to(STARTER)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source.read_text(encoding="utf-8").replace("VERSION", __version__), encoding="utf-8")
            written.append(file)
    for name in ("submissions", "verdicts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / ".gitkeep").touch()
    return written


# ---- one submission
def _known(folder: Path, site: Path, stamp: str) -> dict[str, Any] | None:
    """What was formed of a submission before, if all its files are still the same."""
    try:
        digest = packed.digest(folder)
        file = site / "data" / f"{digest}.json"
        if not file.is_file():
            return None
        entry: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if entry["stamp"] != stamp:
            return None
        # The digest is that of a first file that was read before, with all that it must hold.
        packed.check_files(folder, json.loads((folder / packed.FILE_NAME).read_text(encoding="utf-8"))["files"])
    except (DataError, ValueError, KeyError, OSError):
        return None
    return entry


def _form(folder: Path, site: Path, stamp: str, data: str, tokenizer: str) -> dict[str, Any]:
    """Verify a submission, write its report, and keep what tables need; of one that fails, its findings."""
    verdict = verify(folder, data=data, renderer=_renderer(tokenizer))
    entry: dict[str, Any] = {
        "stamp": stamp, "digest": verdict.digest or "unreadable", "name": folder.name, "seen": int(time.time()),
        "level": verdict.level, "findings": verdict.findings, "remarks": verdict.remarks,
    }  # fmt: skip
    if (submission := verdict.submission) and not verdict.findings:
        try:
            entry |= _tell(folder, submission, verdict, site)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # one submission never stops a build
            entry["findings"] = [f"cannot be shown ({type(error).__name__}: {packed.shown(str(error))})"]
    write_atomically(site / "data" / f"{entry['digest']}.json", json.dumps(jsonio.finite(entry), ensure_ascii=False))
    return entry


def _tell(folder: Path, submission: Submission, verdict: Verdict, site: Path) -> dict[str, Any]:
    """What a table needs of a verified submission; its report is written."""
    texts = [doc["generated"] for doc in verdict.docs["elude_forget"]]
    measured = scores.measure(verdict.samples, texts, int(submission.scored["seed"]))
    if not submission.redacted:
        write_report(
            [NamedRun(submission.model, Shown(folder, verdict))], site / "submissions" / f"{verdict.digest}.html"
        )
    return {
        "about": _about(submission),
        "table": _table(submission),
        "columns": scores.row(verdict.samples, verdict.numbers),
        "measured": measured._asdict(),
    }


def _about(submission: Submission) -> dict[str, Any]:
    scored = submission.scored
    names = ("model", "base_model", "method", "role", "submitter", "hardware", "trained_on", "cost", "revision")
    about = {name: getattr(submission, name) for name in names}
    about["method"] += " + guardrail" if scored["guardrail"] else ""
    return {
        **about,
        "versions": scored["versions"],
        "weights": submission.weights or {},
        "redacted": submission.redacted,
    }


def _table(submission: Submission) -> dict[str, Any]:
    """What must be the same for rows to be compared."""
    scored, prints = submission.scored, submission.fingerprints
    name = scored["data"].get("repository") or Path(str(scored["dataset"])).name
    return {
        "data": name,
        "version": hashlib.sha256(json.dumps(sorted(prints.items())).encode()).hexdigest()[:12],
        "base_model": submission.base_model,
        "targets": sorted(scored["targets"]),
        "truth_ratio": scored["truth_ratio"],
        "seed": scored["seed"],
    }


@lru_cache(maxsize=1)
def _renderer(tokenizer: str) -> Renderer | None:
    return Renderer(load_tokenizer(tokenizer)) if tokenizer else None


def _fingerprint(tokenizer: str) -> str:
    renderer = _renderer(tokenizer)
    return renderer.fingerprint if renderer else ""


def _verdicts(folder: Path) -> dict[str, str]:
    """Levels that the board's keepers found by scoring again (``elude verify --rescore --json``), by digest."""
    found = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        table = jsonio.load(file, max_bytes=1 << 20)
        if not isinstance(table, dict) or table.get("level") not in LEVELS or table.get("findings") != []:
            raise DataError(f"{file}: not a verdict of `elude verify --json` that found nothing wrong")
        found[str(table.get("digest"))] = str(table["level"])
    return found


# ---- tables
def _tables(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by table, best first; reference rows below, not ranked."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(json.dumps(entry["table"], sort_keys=True), []).append(entry)
    tables = []
    for key in sorted(groups):
        group = groups[key]
        retrained = [_measured(entry) for entry in group if entry["about"]["role"] == "retrained"]
        reference = retrained[0] if retrained else None
        found = [(entry["about"]["role"], entry, scores.score(_measured(entry), reference)) for entry in group]
        ranked = sorted((f for f in found if f[0] == "submission"), key=lambda f: (-f[2].value, f[1]["digest"]))
        others = sorted((f for f in found if f[0] != "submission"), key=lambda f: (f[0], f[1]["digest"]))
        places = scores.ranks([score for _, _, score in ranked])
        rows = [_row(e, s, place, places.count(place) > 1) for (_, e, s), place in zip(ranked, places, strict=True)]
        rows += [_row(entry, score, None, False) for _, entry, score in others]
        about = {"reference": bool(retrained), "rows": rows, "id": hashlib.sha256(key.encode()).hexdigest()[:12]}
        tables.append(json.loads(key) | about)
    return tables


def _row(entry: Mapping[str, Any], found: Score, rank: int | None, tied: bool) -> dict[str, Any]:
    kept = {name: entry[name] for name in ("digest", "name", "level", "remarks")}
    formed = {"id": entry["digest"], "score": found._asdict(), "rank": rank, "tied": tied}
    return kept | entry["about"] | entry["columns"] | formed


def _measured(entry: Mapping[str, Any]) -> Measured:
    """Kept numbers, where null stands for NaN."""
    table = entry["measured"]
    values, *covariance = ([math.nan if v is None else v for v in r] for r in (table["values"], *table["covariance"]))
    return Measured(values, covariance, table["distinct"])


# ---- files
def _changes(site: Path, entries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What came, went or was proven further since the last builds, newest first."""
    file = site / "changes.json"
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"levels": {}, "changes": []}
    levels = {digest: [entry["level"], entry["about"]["model"]] for digest, entry in entries.items()}
    changes: list[dict[str, Any]] = []
    for digest in sorted(levels.keys() | old["levels"].keys()):
        now, before = levels.get(digest), old["levels"].get(digest)
        if now != before:
            what = "removed" if now is None else f"now {now[0]}" if before else f"added, {now[0]}"
            seen = entries[digest]["seen"] if now and not before else int(time.time())
            changes.append({"when": seen, "what": what, "model": (now or before)[1], "digest": digest})
    kept = [*sorted(changes, key=lambda c: (-c["when"], c["digest"])), *old["changes"]][:_CHANGES]
    write_atomically(file, json.dumps({"levels": levels, "changes": kept}, ensure_ascii=False))
    return kept


def _write(site: Path, tables: list[dict[str, Any]], changes: Iterable[Mapping[str, Any]]) -> None:
    about = str(scores.__doc__)
    score = " ".join(about.split("\n\n")[2].split())
    board = jsonio.finite({"version": __version__, "score": score, "tables": tables})
    write_atomically(site / "leaderboard.json", json.dumps(board, ensure_ascii=False) + "\n")
    said = {"changes": list(changes)}
    filters: dict[str, Any] = {"percent": _percent, "day": _day}
    page = render(
        PAGE / "board.html.j2", filters, tables=board["tables"], levels=LEVELS, version=__version__,
        about=about, **said,
    )  # fmt: skip
    write_atomically(site / "index.html", page)
    write_atomically(site / "feed.xml", render(PAGE / "feed.xml.j2", filters, **said))


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _percent(value: float | None, places: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{places}f}"
