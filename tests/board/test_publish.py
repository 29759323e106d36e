"""A submission told elsewhere: a pull request on a stand-in of the Hub, and Every Eval Ever's files."""

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard, constants, parse_eval_result_entries

from lm_eval_elude.board import publish
from lm_eval_elude.board.verify import verify
from lm_eval_elude.errors import UserError
from tests.board import runs
from tests.endpoints import Handler, serve
from tests.support import elude, numbers_again

CARD = """---
license: mit
model-index:
- name: Mine
  results:
  - task: {type: text-generation}
    dataset: {name: Other, type: some/other}
    metrics: [{type: accuracy, value: 0.5}]
---
# My own words
"""


class Hub(Handler):
    """The few endpoints that a pull request takes; ``server.files`` are the repository's, ``server.seen`` what came."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        content = self.server.files.get(self.path.rpartition("/")[2])
        missing = {"X-Error-Code": "RepoNotFound" if "/no/where/" in self.path else "EntryNotFound"}
        found = {"ETag": '"1"', "X-Repo-Commit": "0" * 40}
        self.reply(404 if content is None else 200, content or "", **(missing if content is None else found))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                 for f in json.loads(body)["files"]] if "/preupload/" in self.path else []  # fmt: skip
        commit = {"commitUrl": f"{constants.ENDPOINT}/org/name/commit/1", "commitOid": "1" * 40,
                  "pullRequestUrl": self.server.request}  # fmt: skip
        self.reply(200, {"files": files} if files else commit)


@pytest.fixture
def hub(monkeypatch):
    with serve(Hub, files={}, seen=[]) as (place, server):
        server.request = f"{place}/org/name/discussions/1"
        for name, value in {
            "ENDPOINT": place, "HUGGINGFACE_CO_URL_TEMPLATE": place + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
        yield server


def committed(server) -> dict[str, str]:
    """Files of the one commit."""
    (body,) = [b for path, _, b in server.seen if path == "/api/models/org/name/commit/main?create_pr=1"]
    lines = [json.loads(line) for line in body.splitlines()]
    return {v["path"]: base64.b64decode(v["content"]).decode() for v in (x["value"] for x in lines) if "path" in v}


@pytest.fixture(scope="module")
def verdict(submitted, data):
    return verify(submitted, data=str(data))


def test_a_pull_request_has_the_card_with_the_numbers_and_keeps_what_the_repository_says(hub, verdict, monkeypatch):
    hub.files["README.md"] = CARD
    assert publish.pull_request("org/name", verdict, None) == hub.request
    assert {token for _, token, _ in hub.seen} == {"Bearer hf_of_the_environment"}
    (text,) = committed(hub).values()  # data of a folder are no benchmark of the Hub
    card = ModelCard(text)
    assert card.data.license == "mit" and card.data.model_name == "Mine" and card.text.strip() == "# My own words"
    found = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert found["accuracy"] == 0.5
    assert found["forget_quality"] == round(verdict.numbers["elude"]["forget_quality"]["value"], 6)
    # Again, beside a number of the trainer's that the board has not: those of the same name are replaced, not doubled.
    (degenerate,) = [result for result in card.data.eval_results if result.metric_type == "degenerate"]
    of_retain = replace(degenerate, metric_name="degenerate answers, retain (neighbours)", metric_value=0.25)
    of_forget = replace(degenerate, metric_name=f"{degenerate.metric_name} (never knew: 1 %)", metric_value=0.5)
    others = [result for result in card.data.eval_results if result != degenerate]
    page = ModelCard(text)
    page.data.eval_results = [*others, of_forget, of_retain]
    hub.files["README.md"], hub.seen = str(page), []
    publish.pull_request("org/name", verdict, None)
    found = ModelCard(committed(hub)["README.md"]).data.eval_results
    assert {(r.metric_name, r.metric_value) for r in found} == {
        (r.metric_name, r.metric_value) for r in [*card.data.eval_results, of_retain]
    } and len(found) == len(card.data.eval_results) + 1


def test_published_data_give_the_hubs_own_results(hub, verdict, monkeypatch, tmp_path):
    described = {"repository": "some/data", "revision": "0" * 40}
    monkeypatch.setitem(verdict.submission.scored, "data", described)
    (card := tmp_path / "Jane Doe" / "README.md").parent.mkdir()
    data, base = tmp_path / "of a client" / "my-data", tmp_path / "models" / "base"
    (card.parent / "optout.json").write_text(json.dumps({"dataset": str(data), "settings": {"model": str(base)}}))
    text = f"The checkpoint's card: `{data}` and `{base}`, `pretrained={card.parent}`; https://some.where/a/b."
    card.write_text(f"---\nlicense: mit\n---\n{text}\n")
    publish.pull_request("org/name", verdict, card)
    files = committed(hub)
    shown = "The checkpoint's card: `my-data` and `base`, `pretrained=Jane Doe`; https://some.where/a/b."
    assert shown in files["README.md"] and str(tmp_path) not in files["README.md"]
    entries = parse_eval_result_entries(yaml.safe_load(files[".eval_results/elude.yaml"]))
    assert [(e.dataset_id, e.task_id) for e in entries] == [
        ("some/data", f"elude_{name}") for name in ("forget_quality", "retain_quality", "attacked_forget_quality")
    ]
    assert entries[0].value == round(verdict.numbers["elude"]["forget_quality"]["value"], 6)


def test_the_request_says_the_references_values_and_the_level_of_proof(hub, verdict, never_knew):
    publish.pull_request("org/name", verdict, None, never_knew)
    (body,) = [body for path, _, body in hub.seen if "/commit/" in path]
    text = json.loads(body.splitlines()[0])["value"]["description"]
    numbers = [of_run["elude"]["retain_quality"]["value"] for of_run in (verdict.numbers, numbers_again(never_knew))]
    assert f"| retain quality (RQ) | {100 * numbers[0]:.1f} % | {100 * numbers[1]:.1f} % |" in text.splitlines()
    assert "Level of proof: recomputed (every number follows from the logged answers)" in text
    assert text in committed(hub)["README.md"]  # the repository has no card


def test_a_hub_that_refuses_is_one_line_and_the_submission_stays(hub, original, data, tmp_path, monkeypatch):
    out, exchange = tmp_path / "mine", tmp_path / "exchange"
    submit = ("submit", original.path, "--out", out, "--submitter", "A. Nobody", "--base-model", "b", "--role",
              "original", "--every-eval-ever", exchange, "--hub")  # fmt: skip
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = elude(*submit, "org/name")
    assert code == 2 and "HF_TOKEN" in err and not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="HF_TOKEN"):
        publish.token("org/name")
    monkeypatch.setenv("HF_TOKEN", "t")
    code, _, err = elude(*submit, "no/where")
    assert code == 2 and len(err.splitlines()) == 1 and "no/where" in err and f"{out} is written" in err
    assert not hub.seen and not verify(out, data=str(data)).findings and list(exchange.rglob("*_samples.jsonl"))
    shutil.rmtree(out)
    code, printed, _ = elude(*submit, "org/name")
    assert code == 0 and hub.request in printed and out.is_dir()


def test_a_submission_whose_other_files_were_not_written_is_not_there_either(original, tmp_path, monkeypatch):
    """A command that is killed between the two can be given again."""
    out, exchange = tmp_path / "mine", tmp_path / "exchange"
    submit = ("submit", original.path, "--out", out, "--submitter", "A. Nobody", "--base-model", "b", "--role",
              "original", "--every-eval-ever", exchange)  # fmt: skip

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publish, "every_eval_ever", stop)
        code, _, _ = elude(*submit)
    assert code == 130 and not list(tmp_path.iterdir())
    code, printed, _ = elude(*submit)
    (file,) = exchange.rglob("*[!s].json")
    assert code == 0 and f"written: {file}" in printed and out.is_dir()


# ---- Every Eval Ever
AGGREGATE = {
    "schema_version", "evaluation_id", "retrieved_timestamp", "source_metadata", "eval_library", "model_info",
    "evaluation_results",
}  # fmt: skip
INSTANCE = {
    "schema_version", "evaluation_id", "model_id", "evaluation_name", "sample_id", "interaction_type", "input",
    "output", "answer_attribution", "evaluation",
}  # fmt: skip


def test_every_eval_evers_files_have_its_shape_and_the_verified_numbers(submitted, verdict, original, tmp_path):
    file = publish.every_eval_ever(submitted, tmp_path, verdict)
    place = file.relative_to(tmp_path)
    assert place.parts[:2] == ("data", "elude") and len(place.parts) == 5
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.json", file.name)
    # Whatever it says in `additional_details` is text.
    details = []
    whole = json.loads(file.read_text(), object_hook=lambda table: details.append(table) or table)
    details = [table["additional_details"] for table in details if "additional_details" in table]
    assert len(details) > 3 and all(isinstance(text, str) for table in details for text in table.values())
    assert whole.keys() >= AGGREGATE and whole["schema_version"] == "0.3.0"
    assert whole["model_info"]["id"] == "/".join(place.parts[2:4])
    scores = {r["evaluation_result_id"]: r for r in whole["evaluation_results"]}
    assert len(scores) == len(whole["evaluation_results"])
    for result in scores.values():
        metric, (task, name) = result["metric_config"], result["evaluation_result_id"].split("/")
        assert metric["min_score"] <= result["score_details"]["score"] <= metric["max_score"]
        assert result["score_details"]["score"] == verdict.numbers[task][name]["value"]
    lower = {key for key, result in scores.items() if result["metric_config"]["lower_is_better"]}
    assert {"elude_forget/probability", "elude_retain/degenerate"} <= lower
    assert not {"elude_forget/forget_quality", "elude_retain/probability", "elude/retain_quality"} & lower
    detail = whole["detailed_evaluation_results"]
    content = (tmp_path / detail["file_path"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == detail["checksum"]
    rows = [json.loads(line) for line in content.decode().splitlines()]
    assert len(rows) == detail["total_rows"] == sum(len(s) for t, s in verdict.samples.items() if t != "elude_mia")
    for row in rows:
        assert row.keys() >= INSTANCE and row["evaluation_id"] == whole["evaluation_id"]
        assert row["model_id"] == whole["model_info"]["id"] and row["evaluation_result_id"] in scores
    of_forget = [row["evaluation"] for row in rows if row["evaluation_name"] == "elude_forget"]
    assert [row["score"] for row in of_forget] == [s.values["quality"] for s in original.samples("elude_forget")]
    # The bundled model knows its facts: most of what it says is right, whatever a score makes of it.
    assert sum(row["is_correct"] for row in of_forget) >= len(of_forget) / 2
    again = publish.every_eval_ever(submitted, tmp_path / "again", verdict)
    assert again.read_bytes() == file.read_bytes()


def test_a_name_is_no_path(original, data, tmp_path):
    folder = runs.submission(tmp_path / "submission", original, model="../.. / x")
    file = publish.every_eval_ever(folder, tmp_path / "out", verify(folder, data=str(data)))
    written = [p for p in tmp_path.rglob("*.json*") if folder not in p.parents]
    assert file in written and all(p.parent == file.parent for p in written)
    assert file.parent.parent.parent == tmp_path / "out" / "data" / "elude"
