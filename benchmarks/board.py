"""How long a leaderboard takes: the first build, the build with one more submission, and the page of many rows.

    python -m benchmarks.board runs/board [--count 1000] [--rows 10000]

Copies of real submissions under other names. The membership attack that a process remembers of one is forgotten before
the next, as a thousand different ones would have it. The page's rows are copies of the table's with other numbers, and
it is opened in a Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from lm_eval_elude.board import keeper, pages, site
from lm_eval_elude.board import submission as packed
from lm_eval_elude.scoring import membership
from tests.browser import Browser


def copy(source: Path, out: Path, model: str) -> None:
    """A submission under another name; its other files are shared."""
    (out / packed.SAMPLES).mkdir(parents=True)
    for name in packed.listing(source):
        if name != packed.FILE_NAME:
            os.link(source / name, out / name)
    table = json.loads((source / packed.FILE_NAME).read_text(encoding="utf-8"))
    (out / packed.FILE_NAME).write_text(json.dumps({**table, "model": model}), encoding="utf-8")


def timed(board: Path, out: Path) -> tuple[site.Built, str]:
    """What a build did, and its seconds on the clock and of processor time."""
    start, before = time.perf_counter(), os.times()
    done = site.build(board, out)
    used = sum(a - b for a, b in zip(os.times()[:4], before[:4], strict=True))
    return done, f"{time.perf_counter() - start:.1f} s, {used:.1f} s of processor time"


def many(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Ranked rows with numbers of their own, copied from those of a table, and its references."""
    rng = random.Random(0)
    references = [row for row in rows if row["role"] != "submission"]
    sources = [row for row in rows if row["role"] == "submission"]
    made = []
    for place in range(count):
        source = sources[place % len(sources)]
        row = {**source, "digest": rng.randbytes(32).hex(), "model": f"organisation/model-{place}", "status": "ranked"}
        row |= {key: {**source[key], "value": rng.random()} for key in ("fq", "rq", "known", "auc")}
        row["score"] = {**source["score"], "value": 1 - place / count}
        made.append(row | {"rank": place + 1, "tied": False})
    return made + references


def opened(out: Path, rows: int, folder: Path) -> str:
    """The size of the page with so many rows, the seconds until a Chromium shows it, and those that a filter takes."""
    tables = json.loads((out / "leaderboard.json").read_text(encoding="utf-8"))["tables"][:1]
    tables[0]["rows"] = many(tables[0]["rows"], rows)
    pages.write_tables(out, tables)
    browser = Browser(folder / "profile")
    try:
        browser.call("Performance.enable", timeDomain="threadTicks")
        start = time.perf_counter()
        browser.open(out / "index.html")
        browser.ask("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")  # it is painted
        seconds = time.perf_counter() - start
        metrics = {row["name"]: row["value"] for row in browser.call("Performance.getMetrics")["metrics"]}
        start = time.perf_counter()
        browser.ask("filters.text.value = 'model-77'; filters.dispatchEvent(new Event('input'))")
        return (
            f"page of {rows} rows: {(out / 'index.html').stat().st_size / 1e6:.1f} MB, opens in {seconds:.1f} s "
            f"({metrics['TaskDuration']:.1f} s of the page's processor time), "
            f"is filtered in {time.perf_counter() - start:.2f} s"
        )
    finally:
        browser.close()


def main() -> None:
    """Make the copies, build twice, open the page, print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("board", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000)
    asked = parser.parse_args()
    verify = site.verify

    def forgetful(*arguments: Any, **named: Any) -> Any:
        membership.membership_attack.cache_clear()
        return verify(*arguments, **named)

    site.verify = forgetful
    # References stand once; all others are copied.
    known = {p: json.loads((p / packed.FILE_NAME).read_text()) for p in sorted((asked.board / "submissions").iterdir())}
    references = [path for path, table in known.items() if table["role"] != "submission"]
    submissions = [path for path in known if path not in references]
    with tempfile.TemporaryDirectory(dir=asked.board) as folder:
        board, out = Path(folder, "board"), Path(folder, "site")
        board.mkdir()
        shutil.copyfile(asked.board / keeper.FILE, board / keeper.FILE)
        for path in references:
            shutil.copytree(path, board / path.name)
        for i in range(asked.count):
            copy(submissions[i % len(submissions)], board / f"{i:05}", f"model {i}")
        print(f"first build of {asked.count}:", *timed(board, out))
        copy(submissions[0], board / "new", "new")
        print("with one more:", *timed(board, out))
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        print(f"site: {size / 1e6:.0f} MB; peak {peak / 1e3:.0f} MB")
        print(opened(out, asked.rows, Path(folder)))


if __name__ == "__main__":
    main()
