"""Requests that come one after another: what goes on being forgotten, what the manifest keeps, what is refused."""

import json
from dataclasses import replace

import pytest

from lm_eval_elude.data import bundled, dataset
from lm_eval_elude.data.manifest import Manifest, Request, read_manifest, write_manifest
from lm_eval_elude.errors import UserError
from optout_train.config import TrainConfig, build_config, earlier_request
from optout_train.score import score_run
from optout_train.sources import lessons_model, original_of
from tests.support import optout, write_jsonl
from tests.train.conftest import ENTITY, rows

BOB, CLEO = "Bob Example", "Cleo Example"


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A data set of three entities."""
    folder, names = tmp_path_factory.mktemp("people"), (ENTITY, BOB, CLEO)
    secrets = [row for name in names for row in rows(4, name, f"{name.split()[0]}'s secret")]
    write_jsonl(folder / "forget_qa-train.jsonl", secrets)
    for split in ("train", "validation", "test"):
        habits = [row for name in names for row in rows(4, name, f"the habit of {name.split()[0]}'s neighbour")]
        write_jsonl(folder / f"retain_qa-{split}.jsonl", habits)
        write_jsonl(folder / f"world-{split}.jsonl", rows(4, "", "the world's river"))
    return folder


@pytest.fixture
def request_of(arguments, people, tmp_path):
    """Forget a target, in a model that an earlier request is of; returns exit code, standard error and manifest."""

    def run(name, target, model=None, *extra):
        words = arguments(tmp_path / name, "--epochs", "1", "--no-validate", *extra)
        words[1] = target
        words[words.index("--dataset") + 1] = str(people)
        if model:
            words[words.index("--model") + 1] = str(tmp_path / model)
            place = words.index("--dataset")  # the earlier request's, where none is given
            del words[place : place + 2]
        code, _, err = optout(*words)
        return code, err, read_manifest(tmp_path / name)

    return run


def forget_fingerprint(people, *names):
    return dataset.load_records(str(people), "forget", "train", names).fingerprint


def test_earlier_targets_stay_forgotten_and_the_chain_is_kept(request_of, people):
    (_, _, first), (_, _, second) = request_of("first", "ada"), request_of("second", "bob", "first")
    _, _, third = request_of("third", "cleo", "second")
    assert (first.requests, first.targets, first.first_base) == ([], (ENTITY,), third.first_base)
    assert second.targets == (ENTITY, BOB) and third.targets == (ENTITY, BOB, CLEO)
    assert second.dataset == third.dataset == str(people)
    assert second.data_fingerprints["forget-train"] == forget_fingerprint(people, ENTITY, BOB)
    assert [request["targets"] for request in third.requests] == [[ENTITY], [BOB]]
    assert [request["weights"] for request in third.requests] == [first.weights, second.weights]
    assert third.base_model["weights"] == second.weights and third.earlier_targets == (ENTITY, BOB)
    assert all(request["written"].endswith("+00:00") for request in third.requests)


@pytest.mark.parametrize(
    ("base", "first", "settings", "original"),
    [
        ("tiny", "", {}, str(bundled.MODEL)),
        ("/gone/second", "tiny", {}, str(bundled.MODEL)),
        ("/some/second", str(bundled.REFERENCE), {}, str(bundled.REFERENCE)),  # a folder that is there
        ("/some/second", "/gone/first", {}, "/some/second"),
        ("/some/second", "an/id-that-is-not-cached", {}, "/some/second"),
        ("an/id", "", {}, "an/id"),
        ("an/id", "", {"revision": "main"}, ""),
        ("/some/second", f"{bundled.REFERENCE}@v9", {}, "/some/second"),  # which would load another revision
    ],
)
def test_the_original_is_the_first_model_of_the_chain_where_it_is_at_hand(base, first, settings, original):
    name, _, revision = first.partition("@")
    requests = [{"base_model": {"name": name}, "targets": [], "revision": revision}] if first else []
    assert original_of(
        Manifest((ENTITY,), "mini", base_model={"name": base}, settings=settings, requests=requests)
    ) == (original)


def test_without_again_the_new_target_alone_is_trained_on_and_all_are_asked_about(request_of, people):
    request_of("first", "ada")
    _, _, both = request_of("both", "bob", "first")
    _, _, alone = request_of("alone", "bob", "first", "--no-again")
    assert alone.targets == both.targets == (ENTITY, BOB) and alone.weights != both.weights
    assert alone.data_fingerprints["forget-train"] == forget_fingerprint(people, BOB)
    _, _, repeated = request_of("repeated", "ada", "both")  # asked for again: once more, not twice
    assert repeated.targets == (ENTITY, BOB)
    assert repeated.data_fingerprints["forget-train"] == both.data_fingerprints["forget-train"]


def test_lessons_are_made_with_the_model_before_the_first_request(request_of, model_folder, tmp_path):
    line = "lessons were made with the model before the first request: "
    assert line not in request_of("first", "ada", None, "--self-distill")[1]
    assert line not in request_of("plain", "bob", "first")[1]
    code, err, _ = request_of("second", "bob", "first", "--self-distill")
    assert code == 0 and f"{line}{model_folder}" in err
    assert f"{line}{model_folder}" in request_of("third", "cleo", "second", "--self-distill")[1]
    for method, of_the_run in (("npo+rt", False), ("undo+rt", True), ("rmu+rt", True)):
        given = {"target": ("cleo",), "model": str(tmp_path / "second"), "method": method}
        made_with = lessons_model(build_config(given))
        assert made_with == str(tmp_path / "second" if of_the_run else model_folder)


def test_a_finetuning_in_between_ends_no_request(request_of, people, tmp_path, monkeypatch):
    request_of("first", "ada")
    taught = request_of("taught", "bob", "first", "--method", "finetune")[2]
    assert [request["targets"] for request in taught.requests] == [[ENTITY]]
    code, line, _ = request_of("back", "ada", "taught", "--method", "finetune")
    assert code == 2 and "--method finetune would teach Ada Example" in line
    monkeypatch.chdir(people.parent)  # the same data by another name
    _, err, third = request_of("third", "cleo", "taught", "--self-distill", "--dataset", people.name)
    assert third.targets == (ENTITY, CLEO) and [r["targets"] for r in third.requests] == [[ENTITY]]
    assert third.data_fingerprints["forget-train"] == forget_fingerprint(people, ENTITY, CLEO)
    assert "lessons were made with" not in err  # the first model lacks what was taught since
    later = {"target": ("bob",), "model": str(tmp_path / "third"), "self_distill": True}
    assert lessons_model(build_config(later)) == str(tmp_path / "third")


def test_after_a_finetuning_the_targets_of_the_last_requests_data_go_on(tmp_path):
    of_data = ((ENTITY, "mini"), (BOB, "a"), (CLEO, "a"))
    requests: list[Request] = [{"targets": [name], "dataset": data, "base_model": {}} for name, data in of_data]
    taught = Manifest((), "b", method="finetune", requests=requests, settings={"forget_loss": "nll"})
    write_manifest(tmp_path, replace(taught, targets=taught.earlier_targets))
    earlier = earlier_request(str(tmp_path))
    assert earlier and (earlier.targets, earlier.dataset) == ((BOB, CLEO), "a")


def test_a_folder_that_is_called_as_the_bundled_model_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    write_manifest(tmp_path / "tiny", Manifest((ENTITY,), "mini", method="npo"))
    assert earlier_request("tiny") is None and earlier_request("./tiny")


def test_a_manifest_of_a_later_version_or_of_no_requests_is_one_line(tmp_path):
    write_manifest(tmp_path, Manifest((ENTITY,), "mini", method="npo", settings={"forget_loss": "of tomorrow"}))
    assert (earlier := earlier_request(str(tmp_path))) and earlier.targets == (ENTITY,)
    table = json.loads((tmp_path / "optout.json").read_text())
    (tmp_path / "optout.json").write_text(json.dumps(table | {"requests": [{"x": 1}]}))
    with pytest.raises(UserError, match=r"not an Opt-Out manifest: field 'requests\[0\]'"):
        read_manifest(tmp_path)


def test_what_cannot_follow_is_refused(request_of, data_folder, tmp_path):
    request_of("first", "ada")
    code, line, manifest = request_of("back", "ada", "first", "--method", "finetune")
    assert code == 2 and manifest is None and not (tmp_path / "back").exists()
    assert "--method finetune would teach Ada Example" in line and "request is not undone" in line
    code, line, _ = request_of("other", "ada", "first", "--dataset", str(data_folder))
    assert code == 2 and f"forgot Ada Example of the data {read_manifest(tmp_path / 'first').dataset}" in line
    assert request_of("alone", "ada", "first", "--dataset", str(data_folder), "--no-again")[0] == 0
    assert Manifest((ENTITY,), "mini", settings={"revision": "v9"}).request("now")["revision"] == "v9"
    write_manifest(tmp_path / "alone", replace(read_manifest(tmp_path / "alone"), targets=(BOB,)))
    code, line, _ = request_of("again", "ada", "alone", "--method", "finetune")  # gone in the first request
    assert code == 2 and "--method finetune would teach Ada Example" in line


def test_the_table_has_a_part_for_each_target(request_of, tmp_path):
    request_of("first", "ada")
    request_of("second", "bob", "first")
    folder = tmp_path / "second"
    whole, by_target, *_ = score_run(TrainConfig.from_json(read_manifest(folder).settings), folder).split("\n\n")
    assert [line.split()[0] for line in whole.splitlines()[2:]] == ["before", "this"]
    names, columns, *lines = by_target.splitlines()
    assert (names.split(), columns.split()) == ([*ENTITY.split(), *BOB.split()], ["%", "FQ", "first", "FQ", "first"])
    shares = [[float(value) for value in line.split()[-4:]] for line in lines]
    overall = [float(line[20:].split()[2]) for line in whole.splitlines()[2:]]  # the mean over the targets
    assert overall == pytest.approx([(row[1] + row[3]) / 2 for row in shares], abs=0.1)
