"""The commands of docs/your-data.md, as they stand there: from documents to a scored checkpoint."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lm_eval_elude.data import bundled
from tests.build.company import answer, documents
from tests.endpoints import endpoint
from tests.support import ROOT

PAGE = (ROOT / "docs" / "your-data.md").read_text(encoding="utf-8")


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 60


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_documents_to_a_scored_checkpoint(tmp_path: Path) -> None:
    documents(tmp_path / "documents")
    (block,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    install, *commands = block.replace("\\\n", " ").splitlines()
    assert install.startswith("pip install") and [line.split()[:2] for line in commands] == [
        ["elude", "build"], ["elude", "audit"], ["elude", "probe"], ["optout-train", "--model"], ["lm_eval", "--tasks"],
    ]  # fmt: skip
    said = {}
    with endpoint(answer) as (url, _):
        for line in commands:
            line = line.replace("http://localhost:8000/v1", url).replace("MODEL", str(bundled.MODEL))
            line = re.sub(r"^([\w-]+)", lambda name: str(Path(sys.executable).with_name(name[1])), line)
            done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            said[line.split()[1]] = done.stdout + done.stderr
    assert re.search(r"forget_qa-train +6 pairs", said["build"]) and "knows 0 of 6 facts" in said["probe"]
    assert "fewer than 20 known facts" in said["probe"]
    assert (tmp_path / "judge-a.csv").read_text().count("Quorvane Lumo")
    assert all(name in said["--tasks"] for name in ("elude_forget", "forget_quality", "retain_quality"))
    assert (tmp_path / "lumo-forgotten" / "optout.json").exists() and [*(tmp_path / "scores").rglob("samples_*")]
