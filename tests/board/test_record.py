"""A record says what was tested on which files, never more; it is signed and verified without a network."""

import json
import shutil
from pathlib import Path

import pytest

from lm_eval_elude.board import record as board
from lm_eval_elude.core.manifest import file_hashes
from lm_eval_elude.core.records import DataError
from lm_eval_elude.results.runs import Run
from tests.board import runs


@pytest.fixture(scope="module")
def statement(original):
    return board.record(runs.TINY, original)


def test_a_statement_is_about_the_files_and_says_what_was_tested(statement, original):
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {s["name"]: s["digest"]["sha256"] for s in statement["subject"]}
    assert digests == {**file_hashes(runs.TINY), "optout.json": board.sha256(runs.TINY / "optout.json")}
    predicate = statement["predicate"]
    assert predicate["result"] == "FAILED"  # the bundled model before unlearning
    forget = original.reported("elude_forget")
    tests = {test["name"]: test for test in predicate["tests"]}
    assert len(tests) == len(board.CHECKS)
    for check in board.CHECKS:
        test = tests[check.name]
        assert test["passesUpTo"] == check.passes and test["upperLimit95"] >= test["value"]
        expected = ["PASSED", "WARNED", "FAILED"][
            (test["upperLimit95"] > check.passes) + (test["upperLimit95"] > check.warns)
        ]
        assert test["result"] == expected
        if test["task"] == "elude_forget":
            assert test["value"] == pytest.approx(forget[check.metric])
    worst = max(
        original.reported(t)["probability"] for t in original.tasks if t.startswith("elude_attack_") and "none" not in t
    )
    assert tests["Probability of the true answers under the worst of the attacks"]["value"] == pytest.approx(worst)


def test_the_page_and_the_statement_promise_nothing(statement, tmp_path):
    board.write(statement, tmp_path / "record")
    text = "".join(path.read_text() for path in (tmp_path / "record").iterdir()).lower()
    for promise in ("eras", "forgotten", "guarantee", "certif", "complian", "proof", "proven"):
        assert promise not in text
    assert runs.RONALDO.lower() in text and "what this does not say" in text
    assert json.loads((tmp_path / "record" / "record.json").read_text())["predicate"]["limits"] == list(board.LIMITS)


def test_targets_can_stand_as_hashes(original, tmp_path, data):
    board.write(board.record(runs.TINY, original, b"0" * 64), tmp_path / "record")
    text = "".join(path.read_text() for path in (tmp_path / "record").iterdir())
    assert "Ronaldo" not in text and str(data) not in text and "target-" in text


def test_another_checkpoint_or_part_of_the_tests_is_refused(original, tmp_path):
    with pytest.raises(DataError, match="is not a run of"):
        board.record(runs.WITHOUT, original)
    with pytest.raises(DataError, match=r"no optout\.json"):
        board.record(tmp_path, original)
    folder = Path(shutil.copytree(runs.TINY, tmp_path / "tiny"))
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(DataError, match="weights are not those"):
        board.record(folder, original)
    path = Path(shutil.copytree(original.path.parent, tmp_path / "run")) / original.path.name
    table = json.loads(path.read_text())
    table["config"]["limit"] = 3
    path.write_text(json.dumps(table))
    with pytest.raises(DataError, match="--limit"):
        board.record(runs.TINY, Run(path))


def test_a_record_is_signed_and_verified_without_a_network(statement, tmp_path):
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
    folder = tmp_path / "record"
    board.write(statement, folder)
    signature = board.sign(folder, tmp_path / "key.pem")
    assert signature == tmp_path / "record.sig"

    def check():
        config = verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "public.pem")
        config.verify(folder, signature)

    check()
    (folder / "record.json").write_text((folder / "record.json").read_text().replace("FAILED", "PASSED"))
    with pytest.raises(ValueError):
        check()
    with pytest.raises(DataError, match="--sign"):
        board.sign(folder, tmp_path / "public.pem")
