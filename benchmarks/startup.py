"""What the autoload hook costs every interpreter start: `python benchmarks/startup.py` (exit code 1 above 2 ms).

Starts of the same interpreter with and without the hook's site-packages files alternate, so that drift of the machine
falls on both; medians are compared. Both sides read one `.pth` folder: only the hook's own work differs.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

LIMIT_MS = 2.0
HOOK = ("_lm_eval_elude_hook.py", "lm_eval_elude_hook.pth", "lm_eval_elude_hook.start")


def start_ms(folder: Path) -> float:
    """Milliseconds of one interpreter start that treats ``folder`` as a site-packages folder."""
    command = [sys.executable, "-I", "-S", "-c", f"import site; site.addsitedir({str(folder)!r})"]
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return 1000 * (time.perf_counter() - began)


def main(rounds: int = 200) -> int:
    """Print both medians and their difference in milliseconds."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        without, with_hook = Path(temporary) / "without", Path(temporary) / "with"
        for folder in (without, with_hook):
            folder.mkdir()
        for name in HOOK:
            shutil.copy(Path(sysconfig.get_path("purelib")) / name, with_hook)
        times: dict[Path, list[float]] = {without: [], with_hook: []}
        for number in range(rounds + 5):
            for folder in (without, with_hook):
                elapsed = start_ms(folder)
                if number >= 5:  # the first starts write byte code and fill the disk cache
                    times[folder].append(elapsed)
    medians = {folder: statistics.median(values) for folder, values in times.items()}
    cost = medians[with_hook] - medians[without]
    print(f"{rounds} starts each, medians: without {medians[without]:.2f} ms, with {medians[with_hook]:.2f} ms")
    print(f"the hook costs {cost:.2f} ms (limit {LIMIT_MS} ms)")
    return 0 if cost <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())
