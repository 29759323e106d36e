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
import re
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lm_eval_elude import __version__
from lm_eval_elude.board import keeper
from lm_eval_elude.board import score as scores
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.keeper import Table
from lm_eval_elude.board.pages import COMPANIONS, PARTS, write_standings, write_tables
from lm_eval_elude.board.score import Score
from lm_eval_elude.board.submission import Packed, Submission, shown
from lm_eval_elude.board.verify import LEVELS, Verdict, verify
from lm_eval_elude.data import jsonio
from lm_eval_elude.data.files import lock, stamp, write_text
from lm_eval_elude.errors import UserError, reason
from lm_eval_elude.report.comparison import BEFORE, NamedRun
from lm_eval_elude.report.page.page import write_report
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, GROUPS
from lm_eval_elude.scoring.estimates import Estimate, exact
from lm_eval_elude.stress.outcome import ORIGINAL, REFERENCE

STARTER = Path(__file__).with_name("starter")
FILES = "leaderboard-files.json"  # names of a site's files that builds wrote; no other file is replaced or removed
_MAX_FILES = 1 << 28  # bytes of it: two names of 75 characters for each submission
_NAMING = ("pretrained", "peft", "revision", "dtype")  # arguments of a model that run no code of its repository
_BACKENDS = ("elude", "hf", "vllm")  # of lm-eval, that a report's command may name
_NAMES = re.compile(r"index\.html|leaderboard\.(json|csv)|data/[0-9a-f]{64}\.json|submissions/[0-9a-f]{64}\.html")


class Built(NamedTuple):
    """What a build did: submissions in tables, formed anew, and files left out with the reason of each."""

    rows: int
    formed: int
    refused: dict[str, str]


class Kept(msgspec.Struct, frozen=True):
    """``data/DIGEST.json``: what was formed of a submission; ``stamp`` says with which software and reference."""

    stamp: str
    remarks: list[str]
    answers: str  # SHA-256 of all texts and log-probabilities
    columns: dict[str, scores.Column]
    measured: dict[str, float]  # what the score is formed of
    score: Score


class Entry(NamedTuple):
    """A submission, and what it is in its table."""

    place: Path
    digest: str
    submission: Submission
    role: str


class Measure(NamedTuple):
    """What the rows of a table are formed with."""

    table: Table
    data: str  # the table's data set, from here
    companions: list[Entry]  # the table's references, which the report of each row has beside it
    attacks: bool  # whether attacks on the weights are part of the score
    reference: dict[str, float]  # what the score is formed of under the model that never knew

    @property
    def stamp(self) -> str:
        """What a row and its report depend on besides the submission: software and all of this."""
        companions = sorted(entry.digest for entry in self.companions)
        table = msgspec.to_builtins(self.table)
        made_with = json.dumps([__version__, table, sorted(self.reference.items()), self.attacks, companions])
        return hashlib.sha256(made_with.encode()).hexdigest()


class Shown(Packed):
    """A submission's run as its report shows it: without the name that its checkpoint has here."""

    def __init__(self, folder: Path, verdict: Verdict) -> None:
        super().__init__(folder)
        self.path = Path(folder.name) / packed.RESULTS  # the keeper's path is private
        known = BENCHMARKS.keys() | GROUPS.keys()
        reported = {name: row for name, row in self.results["results"].items() if name in known}
        members = {name: GROUPS[name].children for name in reported if name in GROUPS}
        self.results = {**self.results, "results": reported, "group_subtasks": members}
        self._samples, self._docs = verdict.samples, verdict.docs

    @property
    def config(self) -> dict[str, Any]:
        """As the run has it, but of the model only what names it: a reader may copy the command."""
        config = super().config
        backend, given = config.get("model"), config.get("model_args")
        if isinstance(given, str):
            given = dict(part.split("=", 1) for part in given.split(",") if "=" in part)
        texts = {name: str(value) for name, value in given.items()} if isinstance(given, dict) else {}
        named = {name: text for name, text in texts.items() if name in _NAMING and re.fullmatch(r"[\w./@:+-]+", text)}
        return {**config, "model": backend if backend in _BACKENDS else None, "model_args": named}

    def settings(self, task: str) -> dict[str, Any]:
        return {**super().settings(task), "checkpoint": []}

    def rows(self, task: str) -> list[dict[str, Any]]:
        return [{"doc": doc} for doc in self._docs[task]]


def build(folder: Path, site: Path) -> Built:
    """Make or renew the site of a folder with ``board.toml``, submissions and ``verdicts/``.

    Submissions are folders in it or in ``submissions/``. UserError where there is no ``board.toml`` or no submission, a
    reference that it names is not there or does not verify, another build is at work at ``site``, or a file there that
    no build wrote stands where one is needed.
    """
    tables = keeper.read(folder)
    # What a command is still writing has a name that begins with a dot.
    files = [file for place in (folder, folder / "submissions") for file in place.glob(f"[!.]*/{packed.FILE_NAME}")]
    places = sorted(file.parent for file in files if file.is_file())
    if not places:
        raise UserError(f"{folder}: no submission in it (a folder with {packed.FILE_NAME})")
    verdicts, refused = keeper.verdicts(folder)
    members: dict[str, list[Entry]] = {table.name: [] for table in tables}
    for place in places:
        try:
            submission, digest = packed.read(place), packed.digest(place)
            table = keeper.place(tables, submission, digest)
        except Exception as error:  # one submission never stops a build
            refused[place.name] = reason(error).replace(f"{folder}/", "")
        else:
            members[table.name].append(Entry(place, digest, submission, table.role(digest)))
    for table in tables:
        if table.retrained and not any(entry.role == "retrained" for entry in members[table.name]):
            where = f"{folder / keeper.FILE}: {table.name}"
            raise UserError(f"{where}: no submission has the digest of its retrained model")
    names = _names(entry.digest for entries in members.values() for entry in entries)
    with _claimed(site, names) as written:
        ranking, formed, rows = [], 0, 0
        for table in tables:
            references = [entry for entry in members[table.name] if entry.role == "retrained"]
            others = [entry for entry in members[table.name] if entry.role != "retrained"]
            companions = [entry for entry in members[table.name] if entry.role in COMPANIONS]
            attacks = bool(references) and _attacks_count(table, others, verdicts)
            measure = Measure(table, keeper.data(folder, table), companions, attacks, {})
            known, anew = _formed(references, site, measure)
            for entry, kept in known:
                if isinstance(kept, str):
                    raise UserError(f"{folder / keeper.FILE}: {table.name}: the reference {entry.place.name}: {kept}")
                measure = measure._replace(reference=kept.measured)
            more, anew_too = _formed(others, site, measure)
            refused |= {entry.place.name: kept for entry, kept in more if isinstance(kept, str)}
            whole: dict[str, tuple[Entry, Kept]] = {}
            for entry, kept in known + more:
                if isinstance(kept, Kept) and whole.setdefault(entry.digest, (entry, kept))[0] is not entry:
                    refused[entry.place.name] = f"the same submission as {shown(whole[entry.digest][0].place.name)}"
            ranking.append(_table(measure, list(whole.values()), verdicts))
            formed, rows = formed + anew + anew_too, rows + len(whole)
        write_tables(site, ranking)
        write_standings(site, ranking)
        shown_names = _names(row["digest"] for table in ranking for row in table["rows"])
        for name in (written | names) - shown_names:  # of what left or is refused now
            (site / name).unlink(missing_ok=True)
        write_text(site / FILES, json.dumps(sorted(shown_names)))
        return Built(rows, formed, refused)


def start(folder: Path) -> list[Path]:
    """Write what a repository that takes submissions needs; files that are there stay. Returns the files written."""
    written = []
    for source in sorted(p for p in STARTER.rglob("*") if p.is_file()):
        file = folder / source.relative_to(STARTER)
        if not os.path.lexists(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, source.read_text(encoding="utf-8").replace("VERSION", __version__))
            written.append(file)
    for name in ("submissions", keeper.VERDICTS):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / ".gitkeep").touch()
    return written


# ---- one submission
def _formed(entries: Sequence[Entry], site: Path, measure: Measure) -> tuple[list[tuple[Entry, Kept | str]], int]:
    """Each submission of a table with what was formed of it, a text where it was refused; how many were formed now."""
    known = {entry.place: kept for entry in entries if (kept := _known(entry, site, measure))}
    missing = [entry for entry in entries if entry.place not in known]
    form = partial(_form, site=site, measure=measure)
    workers = min(os.cpu_count() or 1, len(missing))
    if workers > 1 and len(missing) > 4:
        with ProcessPoolExecutor(workers, initializer=_begin_worker) as pool:
            done = list(pool.map(form, missing, chunksize=4))
    else:
        done = [form(entry) for entry in missing]
    formed = {entry.place: kept for entry, kept in zip(missing, done, strict=True)}
    return [(entry, known.get(entry.place) or formed[entry.place]) for entry in entries], len(missing)


def _begin_worker() -> None:
    """Make a process that forms submissions end without a word at Ctrl-C, and when the build is killed."""
    gc.set_threshold(1_000_000)  # rows are large and have no cycles: what looks for some takes a tenth of the time
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    build = parent_process()
    assert build
    # Otherwise it would wait for work, and hold its memory, for ever.
    threading.Thread(target=lambda: (build.join(), os._exit(1)), daemon=True).start()


def _attacks_count(table: Table, entries: Sequence[Entry], verdicts: Mapping[str, keeper.KeeperVerdict]) -> bool:
    """Whether attacks on the weights are part of a table's score: once two of three of its ranked rows bring them."""
    rows = [e for e in entries if e.role == "submission" and not keeper.unranked(table, verdicts.get(e.digest))]
    brought = [row.submission.attacked for row in rows]
    return bool(brought) and 3 * sum(brought) >= 2 * len(brought)


def _known(entry: Entry, site: Path, measure: Measure) -> Kept | None:
    """What was formed of a submission before, if all its files are still the same."""
    try:
        kept = jsonio.read(site / "data" / f"{entry.digest}.json", Kept)
        packed.check_files(entry.place, entry.submission.files)
        stamp(site / "submissions" / f"{entry.digest}.html")
    except (UserError, OSError):  # not formed yet, or kept no longer as it was written
        return None
    whole = kept.columns.keys() == {*scores.NAMES} and kept.score.parts.keys() == PARTS.keys()
    return kept if whole and kept.stamp == measure.stamp else None


@lru_cache(maxsize=4)
def _companion(digest: str, role: str, place: Path, data: str) -> NamedRun | None:
    """The run of a table's original or reference for the reports of its other rows; None where it does not verify."""
    verdict = verify(place, data=data)
    whole = not verdict.findings and verdict.digest == digest
    return _in_report(COMPANIONS[role], role, place, verdict) if whole else None


def _in_report(name: str, role: str, place: Path, verdict: Verdict) -> NamedRun:
    return NamedRun(name, Shown(place, verdict), role == "retrained", verdict.outcome)


def _back(entry: Entry, verdict: Verdict, companions: Sequence[Entry]) -> dict[str, tuple[str, Estimate]]:
    """By kind the attack on the weights that brought back most of a row, "" for none, and how much, NaN for not known.

    UserError where the attacks are beside other models than the table's references.
    """
    if entry.role != "submission":  # by definition
        return dict.fromkeys(scores.WEIGHTS, ("", exact(0.0 if entry.role == "retrained" else 1.0)))
    models = {other.role: other.submission.scored["checkpoint"] for other in companions}
    if verdict.outcome is None or "retrained" not in models:
        return dict.fromkeys(scores.WEIGHTS, ("", exact(math.nan)))
    for role, name in (("retrained", REFERENCE), ("original", ORIGINAL)):
        if role in models and not verdict.outcome.is_of(name, models[role] or ()):
            raise UserError(f"{packed.STRESS}: its {name} is not the table's {role} model")
    worst = {name: verdict.outcome.strongest(kind) for name, kind in scores.WEIGHTS.items()}
    return {name: (each.attack, each.back) if each else ("", exact(math.nan)) for name, each in worst.items()}


def _form(entry: Entry, site: Path, measure: Measure) -> Kept | str:
    """Verify a submission, write its report, and keep what tables need; of one that fails, its first finding."""
    submission, role = entry.submission, entry.role
    verdict = verify(entry.place, data=measure.data)
    if verdict.findings:
        return verdict.findings[0]
    try:
        measured = dict(scores.measure(verdict.samples, verdict.docs["elude_forget"], measure.table.seed))
        attacks = _back(entry, verdict, measure.companions)
        worst, back = attacks[scores.BACK]
        if measure.attacks:
            measured[scores.BACK] = back
        values = {name: estimate.value for name, estimate in measured.items()}
        score = scores.score(measured, values if role == "retrained" else measure.reference)
        if worst:
            score = msgspec.structs.replace(score, worst={**score.worst, scores.BACK: worst})
        given = [[doc["answer_scores"], doc.get("generated")] for docs in verdict.docs.values() for doc in docs]
        formed = scores.columns(verdict.numbers, {name: back for name, (_, back) in attacks.items()})
        answers = hashlib.sha256(json.dumps(given).encode()).hexdigest()
        kept = Kept(measure.stamp, verdict.remarks, answers, formed, values, score)
        others = [other for other in measure.companions if other.role != role]
        runs = {other.role: _companion(other.digest, other.role, other.place, measure.data) for other in others}
        # Who calls a model as the page or a verdict calls a companion must not be taken for it.
        taken = submission.model in (*COMPANIONS.values(), BEFORE)
        name = f"{submission.model} (submitted)" if taken else submission.model
        runs[role] = _in_report(COMPANIONS.get(role, name), role, entry.place, verdict)
        write_report(
            [run for role in (*COMPANIONS, "submission") if (run := runs.get(role))],
            site / "submissions" / f"{entry.digest}.html",
            title=f"{submission.model}, {submission.method}",
            standing="not placed yet",
        )
    except UserError as error:
        return str(error)
    except OSError:  # a full disk is no fault of the submission
        raise
    except Exception as error:  # one submission never stops a build
        return f"cannot be shown ({type(error).__name__}: {shown(str(error))})"
    write_text(site / "data" / f"{entry.digest}.json", json.dumps(msgspec.to_builtins(kept), ensure_ascii=False))
    return kept


# ---- tables
def _table(
    measure: Measure, members: Sequence[tuple[Entry, Kept]], verdicts: Mapping[str, keeper.KeeperVerdict]
) -> dict[str, Any]:
    """A table with its rows: ranked ones, best first, then those without a rank and why, then references."""
    table, twins = measure.table, _twins(members)
    rows = [_row(measure, entry, kept, verdicts.get(entry.digest), twins[entry.digest]) for entry, kept in members]
    rows.sort(key=lambda row: (_ORDER.index(row["status"]), -row["score"]["value"], row["digest"]))
    ranked = [row for row in rows if row["status"] == "ranked"]
    ranks = scores.ranks([row["score"]["value"] for row in ranked])
    holders = Counter(ranks)
    for row, rank in zip(ranked, ranks, strict=True):
        row |= {"rank": rank, "tied": holders[rank] > 1}
    identity = hashlib.sha256(table.name.encode()).hexdigest()[:12]
    shown_data = Path(table.dataset).name  # the keeper's path is private
    return {**msgspec.to_builtins(table), "dataset": shown_data, "id": identity, "rows": rows}


_ORDER = ("ranked", "unverified", "withdrawn", "retrained", "original")  # of rows in a table


def _row(
    measure: Measure, entry: Entry, kept: Kept, verdict: keeper.KeeperVerdict | None, twins: list[str]
) -> dict[str, Any]:
    """A row of ``leaderboard.json`` and of the page."""
    submission, about = entry.submission, msgspec.to_builtins(entry.submission)
    names = ("model", "base_model", "method", "submitter", "hardware", "trained_on", "cost", "revision")
    why, status = "", entry.role
    if entry.role == "submission":
        unknown = ", ".join(name for name, part in kept.score.parts.items() if math.isnan(part))
        why = keeper.unranked(measure.table, verdict, "oddness" in measure.reference, measure.attacks)
        if not why and unknown:
            why = f"unverified: its answers do not say {unknown}"
        if not why and not submission.weights:
            why = "unverified: it names no weights, so that nothing says which model was scored again"
        status = why.partition(":")[0] or "ranked"
    return {
        "digest": entry.digest, "name": entry.place.name, "level": verdict.level if verdict and not why else LEVELS[0],
        "date": verdict.date if verdict else "", "status": status, "reason": why, "rank": None, "tied": False,
        "remarks": [*twins, *([] if verdict else kept.remarks)],
        "links": _links(submission), **{name: about[name] for name in names}, "role": entry.role,
        "method": submission.method + " + guardrail" * bool(submission.scored["guardrail"]),
        "versions": submission.scored["versions"], "weights": submission.weights or {},
        **msgspec.to_builtins(kept.columns), "score": msgspec.to_builtins(kept.score),
    }  # fmt: skip


def _links(submission: Submission) -> dict[str, str]:
    """Addresses of the model, its code and its paper, as far as the submitter named them."""
    links = {"model": f"https://huggingface.co/{submission.model}/tree/{submission.revision}"}
    if not re.fullmatch(r"[\w.-]+/[\w.-]+/\w+", f"{submission.model}/{submission.revision}", re.ASCII):
        links = {}
    return links | {name: link for name in ("code", "paper") if (link := getattr(submission, name))}


def _twins(members: Sequence[tuple[Entry, Kept]]) -> dict[str, list[str]]:
    """By digest, lines that name other submissions with the same weights or the same answers; three of each."""
    lines: dict[str, list[str]] = {entry.digest: [] for entry, _ in members}
    for what in ("weights", "answers"):
        groups: dict[Any, list[Entry]] = defaultdict(list)
        for entry, kept in members:
            same = kept.answers if what == "answers" else frozenset((entry.submission.weights or {}).values())
            groups[same or entry.digest].append(entry)
        for entry, others in ((entry, group) for group in groups.values() for entry in group):
            names = [shown(other.place.name) for other in others if other is not entry]
            lines[entry.digest] += [f"the same {what} as {name}" for name in names[:3]]
    return lines


# ---- files
def _names(digests: Iterable[str]) -> set[str]:
    """Names of the files of a site that shows these submissions."""
    of_rows = {name for digest in digests for name in (f"data/{digest}.json", f"submissions/{digest}.html")}
    return {"index.html", "leaderboard.json", "leaderboard.csv"} | of_rows


@contextmanager
def _claimed(site: Path, names: Iterable[str]) -> Iterator[set[str]]:
    """Names of the site's files that earlier builds wrote; from now on those of this one are among them.

    UserError where a file that no build wrote has one of the names, or another build is at work.
    """
    (site / "data").mkdir(parents=True, exist_ok=True)
    (site / "submissions").mkdir(exist_ok=True)
    file = site / FILES
    with lock(file, f"--out {site}: another build is at work there"):  # neither would know of the other's files
        written = set(jsonio.read(file, list[str])) if os.path.lexists(file) else set()
        if odd := [name for name in written if not _NAMES.fullmatch(name)]:
            raise UserError(f"{file}: {shown(odd[0])} is no file of a leaderboard")
        if foreign := sorted(name for name in names if name not in written and os.path.lexists(site / name)):
            raise UserError(
                f"--out {site}: {foreign[0]} was not written by a build; name another folder, or take it away"
            )
        write_text(file, json.dumps(sorted(written.union(names))))
        yield written
