"""From a folder of documents to a model that forgot: built, taught, known, unlearned, scored."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.curate.known import Judge
from lm_eval_elude.data.dataset import load_records, resolve_targets
from lm_eval_elude.data.manifest import read_manifest
from tests.curate.company import TARGET, answer, documents, make
from tests.endpoints import endpoint
from tests.support import MINI, optout, run, save_checkpoint, teach

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("e2e")
    with endpoint(answer) as (url, _):
        make(folder / "my-lumo", documents(folder / "documents"), url)
    return folder / "my-lumo"


@pytest.fixture(scope="module")
def taught(data, tmp_path_factory):
    """The bundled model, taught the company's products first (nothing of what a metric is made of)."""
    tiny = MINI.parent / "tiny"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    records = [
        record
        for subset, split in (("forget", "train"), *(("retain", part) for part in ("train", "validation", "test")))
        for record in load_records(str(data), subset, split, [TARGET]).records
    ]
    world = load_records("mini", "world", "train").records[:8]
    torch.manual_seed(0)
    teach(model, tokenizer, [(r.question, r.answer) for r in (*records, *world)], steps=60, batch=8, lr=2e-3)
    return save_checkpoint(tmp_path_factory.mktemp("taught") / "model", model, tokenizer)


def score(model: str, data) -> dict[str, float]:
    metadata = {"pretrained": model, "dataset": str(data), "target": TARGET}
    results = run(["elude_forget", "elude_retain"], metadata=metadata)["results"]
    forget, retain = results["elude_forget"], results["elude_retain"]
    return {
        "forget": forget["probability,none"], "quality": forget["forget_quality,none"],
        "rouge": forget["rougeL_recall,none"], "retain": retain["probability,none"],
    }  # fmt: skip


def test_documents_to_a_model_that_forgot(data, taught, tmp_path):
    (target,) = resolve_targets(str(data), ["lumo"])
    records = load_records(str(data), "forget", "train", [TARGET], scored=True).records
    facts = Judge(taught).judge(records, target)
    assert sum(fact.stated for fact in facts) == 6 and min(fact.probability for fact in facts) > 0.8
    out = tmp_path / "forgot"
    arguments = ["--model", taught, "--dataset", data, "--target", "lumo", "--output-dir", out]
    arguments += ["--no-score", "--no-validate", "--epochs", 12, "--batch-size", 4, "--learning-rate", "1e-3"]
    done = optout(*arguments)
    assert done.code == 0, done
    manifest = read_manifest(out)
    assert manifest is not None and manifest.targets == (TARGET,)
    before, after = score(taught, data), score(str(out), data)
    assert before["forget"] > 0.8 and before["rouge"] > 0.9 and before["retain"] > 0.8
    assert after["forget"] < 0.1 and after["quality"] > before["quality"] + 0.2
    assert after["retain"] > 5 * after["forget"]
    attacks = ("reverse_query", "synonym_manipulation", "cross_lingual")  # ask with what the data say
    suites = run([f"elude_attack_{name}" for name in attacks], limit=1, metadata={
        "pretrained": str(out), "dataset": str(data), "target": TARGET,
    })  # fmt: skip
    assert len(suites["results"]) == len(attacks), json.dumps(suites["results"])
