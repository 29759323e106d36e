"""A record says what was tested on which files, never more; it is signed and verified without a network."""

import json
import shutil
from pathlib import Path

import pytest

from lm_eval_elude.board import record as board
from lm_eval_elude.data.files import file_hashes
from lm_eval_elude.errors import UserError
from lm_eval_elude.scoring.runs import Run
from lm_eval_elude.scoring.settings import provenance
from tests.board import runs
from tests.board.runs import changed


@pytest.fixture(scope="module")
def statement(original):
    return board.record(runs.TINY, original, records=5)


def test_a_statement_is_about_the_files_and_says_what_was_tested(statement, original):
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {s["name"]: s["digest"]["sha256"] for s in statement["subject"]}
    assert digests == file_hashes(runs.TINY, "*") and "chat_template.jinja" in digests and "config.json" in digests
    assert statement["predicate"]["checked"] == "rescored"
    predicate = statement["predicate"]
    assert predicate["result"] == "FAILED"  # the bundled model before unlearning
    forget = original.reported("elude_forget")
    tests = {test["name"]: test for test in predicate["tests"]}
    assert list(tests) == [row["name"] for row in board.TESTED["tests"]]
    for test, row in zip(tests.values(), board.TESTED["tests"], strict=True):
        limit = test["upperLimit95"]
        assert (test["passesUpTo"], test["warnsUpTo"]) == (row["passes"], row["warns"]) and limit >= test["value"]
        assert test["result"] == ["PASSED", "WARNED", "FAILED"][(limit > row["passes"]) + (limit > row["warns"])]
        if test["metric"] == "degenerate":  # Wilson's limit is above 0 where no answer was gibberish
            assert test["value"] == 0 and limit == pytest.approx(1.96**2 / (test["records"] + 1.96**2), abs=1e-4)
        if test["task"] == "elude_forget":
            assert test["value"] == pytest.approx(forget[row["metric"]])
    attacks = [task for task in original.tasks if task.startswith("elude_attack_") and "none" not in task]
    worst = max(original.reported(task)["probability"] for task in attacks)
    assert tests["Probability of the true answers under the worst of the attacks"]["value"] == pytest.approx(worst)


def test_the_page_and_the_statement_promise_nothing(statement, tmp_path):
    board.write(statement, tmp_path)
    text = "".join(path.read_text() for path in tmp_path.iterdir()).lower()
    for promise in ("eras", "forgotten", "guarantee", "certif", "complian", "proof", "proven"):
        assert promise not in text
    assert runs.RONALDO.lower() in text and "what this does not say" in text
    assert json.loads((tmp_path / "record.json").read_text())["predicate"]["limits"] == board.TESTED["limits"]


def test_targets_can_stand_as_hashes_and_nothing_of_others_is_replaced(original, tmp_path, data, capsys):
    out, key = tmp_path / "record", tmp_path / "record.key"
    command = ("record", runs.TINY, original.path, "--out", out, "--hash-targets", "--records", 1)
    key.write_text("mine")
    code, _, err = runs.elude(capsys, *command)
    assert code == 2 and f"{key} exists already" in err and [*tmp_path.iterdir()] == [key] and key.read_text() == "mine"
    key.unlink()
    code, printed, _ = runs.elude(capsys, *command)
    assert code == 0 and printed.splitlines()[-1] == f"{out}: failed" and len(key.read_text()) == 64
    assert key.stat().st_mode & 0o777 == 0o600
    text = "".join(path.read_text() for path in out.iterdir())
    assert "Ronaldo" not in text and str(data) not in text and "target-" in text


def test_another_checkpoint_or_part_of_the_tests_is_refused(original, tmp_path):
    with pytest.raises(UserError, match="is not a run of"):
        board.record(runs.WITHOUT, original)
    with pytest.raises(UserError, match=r"no optout\.json"):
        board.record(tmp_path, original)
    folder = Path(shutil.copytree(runs.TINY, tmp_path / "tiny"))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(UserError, match="weights are not those"):
        board.record(folder, original)


def set_limit(folder: Path) -> None:
    with changed(next(folder.glob("results_*.json"))) as table:
        table["config"]["limit"] = 3


def edit_answer(folder: Path) -> None:
    """Gibberish in place of an answer, in every column of the log."""
    path = next(folder.glob("samples_elude_forget_*.jsonl"))
    lines = path.read_text().splitlines()
    row = json.loads(lines[0])
    row["doc"]["generated"] = row["resps"][-1][0] = row["filtered_resps"][-1] = "no idea"
    path.write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")


def claim_the_original(folder: Path) -> None:
    """The log of a model that never knew says that it is of the one that was never unlearned."""
    path = next(folder.glob("results_*.json"))
    identities = [provenance({"pretrained": str(model)})["checkpoint"][0] for model in (runs.WITHOUT, runs.TINY)]
    text = path.read_text()
    for before, after in zip(*((c["name"], c["manifest"], *c["weights"].values()) for c in identities), strict=True):
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


@pytest.mark.parametrize(
    "alter, line",
    [
        (set_limit, "--limit 3"),
        (edit_answer, "row 1: rougeL_recall"),
        (claim_the_original, "rescored: .* documents differ"),
    ],
)
def test_results_that_the_checkpoint_does_not_give_are_refused(alter, line, original, never_knew, tmp_path):
    source = never_knew if alter is claim_the_original else original
    folder = Path(shutil.copytree(source.path.parent, tmp_path / "run"))
    alter(folder)
    with pytest.raises(UserError, match=line):
        board.record(runs.TINY, Run(folder), records=5)


def test_a_record_is_signed_and_verified_without_a_network(original, tmp_path, capsys):
    verifying = pytest.importorskip("model_signing.verifying", reason="the extra [sign] is not installed")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    form = serialization.Encoding.PEM
    (tmp_path / "key.pem").write_bytes(
        private.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "public.pem").write_bytes(
        private.public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    folder, signature = tmp_path / "record", tmp_path / "record.sig"
    command = ("record", runs.TINY, original.path, "--out", folder, "--records", 1, "--sign")
    signature.write_text("mine")
    code, _, err = runs.elude(capsys, *command, tmp_path / "key.pem")
    assert code == 2 and f"{signature} exists already" in err and not folder.exists()
    assert signature.read_text() == "mine"
    signature.unlink()
    code, _, err = runs.elude(capsys, *command, tmp_path / "public.pem")
    assert code == 2 and "--sign" in err and not folder.exists() and not signature.exists()
    assert runs.elude(capsys, *command, tmp_path / "key.pem")[0] == 0

    def check():
        config = verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "public.pem")
        config.verify(folder, signature)

    check()
    (folder / "record.json").write_text((folder / "record.json").read_text().replace("FAILED", "PASSED"))
    with pytest.raises(ValueError):
        check()
