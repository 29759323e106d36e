"""Scored again: the model that is claimed agrees, another does not, and nothing of a submitter steers the draw."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from lm_eval_elude.board import keeper
from lm_eval_elude.board import rescore as board
from lm_eval_elude.board import submission as packed
from lm_eval_elude.board.rescore import other_decoding
from lm_eval_elude.board.verify import verify
from lm_eval_elude.errors import UserError
from lm_eval_elude.model.backend import EludeLM
from lm_eval_elude.model.scorer import load_model
from lm_eval_elude.scoring.benchmark import as_row
from lm_eval_elude.scoring.benchmarks import BENCHMARKS, task_report
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from tests.board import runs
from tests.support import elude, run

BASE = str(runs.TINY)


def again(folder, data, model=BASE, task="", **how):
    """A verdict by the base model's tokenizer, and what came of asking a model again, of one task or of all."""
    verdict = verify(folder, data=str(data), renderer=Renderer(load_tokenizer(BASE)))
    assert not verdict.findings
    verdict.samples = {task: verdict.samples[task]} if task else verdict.samples
    return verdict, board.rescore(folder, verdict, str(model), BASE, **({"seed": 0, "records": 14} | how))


def test_the_model_agrees_also_with_a_template_of_the_submitters_and_another_model_does_not(submitted, data, tmp_path):
    folder = Path(shutil.copytree(runs.TINY, tmp_path / "model"))
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_text("{{ raise_exception('read') }}")
    verdict, found = again(submitted, data, folder)
    assert verdict.level == "rescored" and not verdict.findings and found.gap < 1e-3 and not found.ties
    assert found.records == len(verdict.samples) == found.texts + 1 and found.weights == verdict.submission.weights
    wrong, _ = again(submitted, data, runs.WITHOUT)
    assert not wrong.level and [line.partition(":")[0] for line in wrong.findings] == ["rescored"] * 5
    expected = ("weights in the folder", "nats a token", "Min-K% or Min-K%++ of", "texts are not", "likeliest tokens")
    for line, words in zip(wrong.findings, expected, strict=True):
        assert words in line
    with pytest.raises(UserError, match=r"--rescore .*safetensors"):
        again(submitted, data, tmp_path)
    with pytest.raises(UserError, match=r"--backend hf: gives no log-probabilities of single tokens"):
        again(submitted, data, backend="hf")


def test_decoding_that_the_base_does_not_have_is_a_mask(submitted, data, tmp_path):
    """The weights are those submitted, and words are kept out of every text by a file beside them."""
    folder = Path(shutil.copytree(runs.TINY, tmp_path / "model"))
    with runs.changed(folder / "generation_config.json") as settings:
        settings["suppress_tokens"] = [load_tokenizer(BASE).convert_tokens_to_ids("a")]
    verdict, _ = again(submitted, data, folder, "elude_mia")
    assert verdict.findings == [
        "rescored: the model's generation_config.json sets suppress_tokens otherwise than its base's"
    ]


def test_decoding_of_a_base_that_is_not_at_hand_is_a_remark(tmp_path):
    own = GenerationConfig(repetition_penalty=1.1, max_new_tokens=9)
    assert other_decoding(own, str(tmp_path)) == (["repetition_penalty"], False)
    own.save_pretrained(tmp_path)
    assert other_decoding(own, str(tmp_path)) == ([], True)
    assert other_decoding(GenerationConfig(), "no/such") == ([], True)
    assert other_decoding(own, BASE) == (["repetition_penalty"], True)


def test_all_is_reproduced_and_the_draw_is_of_the_seed_and_of_every_task(submitted, data, monkeypatch):
    verdict, found = again(submitted, data, records=0)
    assert verdict.level == "reproduced" and found.records == found.total == sum(map(len, verdict.samples.values()))
    asked, sources = [], []

    class Stop(Exception):
        pass

    def evaluate(*_, samples, metadata, **__):
        asked.append(samples)
        sources.append(metadata["dataset"])
        raise Stop

    monkeypatch.setattr("lm_eval.simple_evaluate", evaluate)
    for seed in (1, 1, 2):
        with pytest.raises(Stop):
            again(submitted, data, seed=seed, records=2 * len(verdict.samples))
    assert asked[0] == asked[1] != asked[2]
    again_at = verify(submitted, data=str(data), renderer=Renderer(load_tokenizer(BASE)))
    again_at.data = f"hub@{'a' * 40}"  # the commit that was scored, whatever the newest is
    with pytest.raises(Stop):
        board.rescore(submitted, again_at, BASE, BASE, seed=1)
    assert verdict.data == str(data) and sources == [str(data)] * 3 + [again_at.data]
    assert asked[0].keys() == verdict.samples.keys() and {len(rows) for rows in asked[0].values()} == {2}


def of_the_forget_set(change, submitted, data, place, **how):
    """What comes of asking the model all of the forget set again, in which each document is another."""
    verdict = verify(submitted, data=str(data))
    verdict.samples = {"elude_forget": verdict.samples["elude_forget"]}
    folder = Path(shutil.copytree(submitted, place / "copy"))
    with runs.changed(folder / packed.SAMPLES / "elude_forget.jsonl.gz") as rows:
        for row in rows:
            change(row["doc"])
    return verdict, board.rescore(folder, verdict, BASE, BASE, seed=0, records=0, **how)


def better_scores(doc):
    doc["answer_scores"][0][0] -= 2.0


def no_number(doc):
    """A NaN behind numbers that agree, which hides all that is formed of it."""
    doc["answer_scores"][2][0] = math.nan


@pytest.mark.parametrize(
    "forge, line",
    [
        (lambda doc: doc.update(generated="He is a singer of that name."), "8 of 8 texts"),
        (lambda doc: doc.update(generated=doc["generated"].rpartition(" ")[0]), "8 of 8 texts"),
        (better_scores, "8 of 8 documents differ"),
        (no_number, "8 of 8 documents differ"),
        (lambda doc: doc.update(greedy=[False, *doc["greedy"][1:]]), "8 of 8 answers have other likeliest tokens"),
    ],
)
def test_a_forged_forget_set_is_found(forge, line, submitted, data, tmp_path):
    """A tenth of all texts could be forged once, which is more than the forget set has."""
    verdict, _ = of_the_forget_set(forge, submitted, data, tmp_path)
    assert not verdict.level and line in verdict.findings[0], verdict.findings


def test_what_a_backend_without_single_tokens_answered_is_scored_again(submitted, data, tmp_path):
    verdict, found = of_the_forget_set(lambda doc: doc.pop("greedy"), submitted, data, tmp_path)
    assert not verdict.findings and verdict.level == "reproduced" and found.records == 8


def members_stand_out(responses):
    """All of the record's tokens as likely as their mean, with the sum of its log-probabilities."""
    answer = [float(value) for value in responses[0][0]]
    responses[0][0] = [sum(answer) / len(answer)] * len(answer)


def expected_less(responses):
    """The record's tokens all likelier than the model's distribution has it, by standard deviations."""
    responses[0][2] = [float(value) - 4.0 for value in responses[0][2]]


def all_but_certain(responses):
    """The model is said to be certain of every token."""
    responses[0][3] = [float(value) / 1_000 for value in responses[0][3]]


@pytest.mark.parametrize("forge", [members_stand_out, expected_less, all_but_certain])
def test_the_log_probabilities_of_single_tokens_are_the_models(forge, submitted, data, tmp_path):
    """Forged so that every number follows: the sum of an answer says nothing of its least likely tokens."""
    folder, task = Path(shutil.copytree(submitted, tmp_path / "copy")), "elude_mia"
    with (
        runs.changed(folder / packed.RESULTS) as results,
        runs.changed(folder / packed.SAMPLES / f"{task}.jsonl.gz") as rows,
    ):
        settings = results["configs"][task]["metadata"]["elude"]
        for row in rows:
            forge(row["filtered_resps"])
            row["resps"] = [[response] for response in row["filtered_resps"]]
        samples = [BENCHMARKS[task].measure(row, settings) for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            row |= {name: sample.values[name] for name in row["metrics"]}
        settings["aggregates"] = task_report(task, samples, settings)
        results["results"][task] |= as_row(settings["aggregates"])
    runs.hashed_again(folder)
    verdict, _ = again(folder, data, task=task, records=0)
    assert len(verdict.findings) == 1 and "of 8 records is not what the model" in verdict.findings[0], verdict.findings


@pytest.mark.slow
def test_what_the_original_is_said_to_find_odd_is_asked_of_it_again(submitted, data, tmp_path):
    metadata = {"pretrained": BASE, "dataset": str(data), "target": runs.RONALDO, "original": BASE}
    logged = run(["elude_forget"], "elude", metadata=metadata, log_samples=True)["samples"]["elude_forget"]
    honest = {row["doc"]["id"]: row["doc"]["original"] for row in logged}

    def forge(doc):
        original, (total, tokens) = honest[doc["id"]]["oddness_scores"]
        doc["original"] = honest[doc["id"]] | {"oddness_scores": [original, [total + 5.0, tokens]]}

    def spoil(doc):
        name, (original, answer) = (honest[doc["id"]][key] for key in ("invented_name", "oddness_scores"))
        scores = [[], [[0.0, 0]] * 2, [original], [original, [math.nan, 1]], [["a", 1], answer]]
        odd = [None, {}, 1, *({"generated": "", "invented_name": name, "oddness_scores": each} for each in scores)]
        doc["original"] = odd[doc["id"]]

    def say(doc):
        doc["original"] = honest[doc["id"]]

    verdict, found = of_the_forget_set(say, submitted, data, tmp_path / "honest", original=BASE)
    assert found.oddness == 8 and verdict.level == "reproduced", verdict.findings
    for change in (forge, spoil):
        verdict, found = of_the_forget_set(change, submitted, data, tmp_path / change.__name__, original=BASE)
        assert found.oddness == 8 and not verdict.level
        assert "the original finds 8 of 8 answers otherwise odd" in verdict.findings[0]


def test_a_table_with_oddness_ranks_only_where_the_original_was_asked_again():
    table = keeper.Table("t", "mini", ("b",), ("f",), ("e",), 0, "geometric", {})
    verdict = keeper.KeeperVerdict("d", "rescored", [], "f")
    asked = keeper.KeeperVerdict("d", "rescored", [], "f", rescored=keeper.Asked(8))
    assert [keeper.unranked(table, each, True)[:10] for each in (verdict, asked)] == ["unverified", ""]
    assert not keeper.unranked(table, verdict, False)


@pytest.mark.slow
def test_only_a_text_that_is_greedy_to_its_end_but_for_near_ties_passes(submitted):
    lm = EludeLM(pretrained=BASE)
    for row in packed.packed_rows(submitted / packed.SAMPLES / "elude_forget.jsonl.gz"):
        *_, last = row["arguments"].values()
        context, wanted, text = last["arg_0"], last["arg_1"], row["doc"]["generated"]
        assert board.least_greedy(lm, context, wanted, text) <= 1e-4
        for other in (text.rpartition(" ")[0], f"{text} Or not.", text.replace(" the ", " a ") + "!", ""):
            assert board.least_greedy(lm, context, wanted, other) > board.NEAR_TIE
    # A text as long as it may be has no end to look at.
    tokens = len(lm.tok_encode(context + text)) - len(lm.tok_encode(context))
    assert board.least_greedy(lm, context, wanted | {"max_gen_toks": tokens}, text) <= 1e-4


def test_a_text_passes_in_the_tokens_that_the_model_chose_though_the_tokenizer_reads_others(tmp_path, monkeypatch):
    lm = EludeLM(pretrained=str(runs.noisy(tmp_path)))  # writes what nobody would
    wanted = {"until": ["<|end|>"], "max_gen_toks": 9, "do_sample": False}
    contexts = [f"<|begin|><|user|>{word}<|end|>\n<|assistant|>\n" for word in ("Who?", "Why?", "A", "B", "C", "D")]
    texts = lm.generate_until([Instance("generate_until", {}, (c, wanted), 0) for c in contexts], disable_tqdm=True)
    written = [*zip(contexts, texts, strict=True)]
    assert max(board.least_greedy(lm, context, wanted, text) for context, text in written) < 1e-4
    assert min(board.least_greedy(lm, context, wanted, f"{text} Or not.") for context, text in written) > board.NEAR_TIE
    monkeypatch.setattr(board, "_walked", lambda *_: math.inf)
    assert max(board.least_greedy(lm, context, wanted, text) for context, text in written) > board.NEAR_TIE


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def deeper(folder):
    (folder / "deep").mkdir()
    shutil.copyfile(folder / "model.safetensors", folder / "deep" / "model.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "deep/model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def configured(folder):
    deeper(folder)
    with runs.changed(folder / "config.json") as table:
        table["transformers_weights"] = "deep/model.safetensors"


@pytest.mark.parametrize("hide", [pickled, deeper, configured])
def test_weights_that_are_loaded_have_a_hash(hide, submitted, data, tmp_path):
    folder = Path(shutil.copytree(BASE, tmp_path / "model"))
    hide(folder)
    (folder / "model.safetensors").unlink()
    save_file({"decoy": torch.zeros(1)}, folder / "decoy.safetensors")
    with pytest.raises(UserError, match=r"--rescore .*: a loader reads weights from .*model\.safetensors'"):
        again(submitted, data, folder)


@pytest.mark.parametrize(("kind", "found"), [("torch.bfloat16", 0), ("torch.float32", 8)])
def test_a_run_is_scored_again_in_its_number_format(kind, found, submitted, data, tmp_path):
    metadata = {"pretrained": BASE, "dataset": str(data), "target": runs.RONALDO}
    lm = EludeLM(pretrained=BASE, dtype="bfloat16", device="cpu")
    logged = run(["elude_forget"], lm, metadata=metadata, log_samples=True)["samples"]["elude_forget"]
    docs = {row["doc"]["id"]: row["doc"] for row in logged}
    folder = Path(shutil.copytree(submitted, tmp_path / "other"))
    with runs.changed(folder / packed.RESULTS) as results:
        results["config"]["model_dtype"] = kind
    runs.hashed_again(folder)
    keys = ("answer_scores", "generated", "greedy")
    verdict, _ = of_the_forget_set(
        lambda doc: doc.update({key: docs[doc["id"]][key] for key in keys}), folder, data, tmp_path, tolerance=1e-3
    )
    assert len(verdict.findings) == bool(found), verdict.findings
    assert not found or "documents differ by more than 0.001 nats" in verdict.findings[0]


def test_an_adapter_is_put_on_the_base_that_the_keeper_names(submitted, data, tmp_path):
    adapted = get_peft_model(load_model(BASE), LoraConfig(r=2))  # does nothing yet
    adapted.save_pretrained(tmp_path / "adapter")
    verdict, found = again(submitted, data, tmp_path / "adapter", base=BASE)
    assert found.gap < 1e-3 and found.weights.keys() == {"adapter_model.safetensors"}
    assert [line for line in verdict.findings if "the weights in the folder are not" not in line] == []


@pytest.mark.parametrize(("weights", "base"), [(True, "tokenizer"), (False, "original")])
def test_an_adapter_of_a_later_request_is_put_on_the_checkpoint_before_it(
    weights, base, submitted, data, tmp_path, monkeypatch
):
    folder = Path(shutil.copytree(BASE, tmp_path / "first"))
    if not weights:
        (folder / "model.safetensors").unlink()
    given = {}
    monkeypatch.setattr(board, "rescore", lambda *_, **how: given.update(how))
    models = {"tokenizer": str(folder), "original": BASE}
    flags = [text for name, model in models.items() for text in (f"--{name}", model)]
    elude("verify", submitted, "--dataset", data, "--rescore", BASE, *flags)
    assert given["base"] == models[base]


def test_of_several_verdicts_a_failed_one_or_that_for_which_most_was_asked_counts(tmp_path):
    (tmp_path / keeper.VERDICTS).mkdir()

    def chosen(*verdicts):
        for number, verdict in enumerate(verdicts):
            table = {"digest": "d", "findings": [], "level": "rescored", "date": f"2026-01-0{number + 1}"} | verdict
            (tmp_path / keeper.VERDICTS / f"{number}.json").write_text(json.dumps(table))
        return keeper.verdicts(tmp_path)[0]["d"]

    asked = {"rescored": {"oddness": 8, "stress": True}}
    assert chosen({"level": "reproduced"}, asked).rescored
    assert chosen(asked, {"level": "reproduced"}).rescored
    assert chosen({"tokenizer": "a"}, {"tokenizer": "b"}).tokenizer == "b"
    assert chosen(asked | {"findings": ["x"], "level": ""}, asked).findings


def test_a_verdict_is_printed_as_the_board_reads_it(submitted, data):
    command = ("verify", submitted, "--dataset", data, "--rescore", BASE)
    code, _, err = elude(*command)
    assert code == 2 and "--rescore needs --tokenizer" in err and len(err.splitlines()) == 1
    code, printed, err = elude("verify", submitted, "--json")  # no word against the submission
    assert code == 2 and not printed and "is not at hand: name yours by --dataset" in err
    code, _, err = elude(*command, "--tokenizer", BASE, "--original", data)
    assert code == 2 and err.startswith(f"Error: --original {str(data)!r} is not a model") and "metadata" not in err
    code, printed, _ = elude(*command, "--tokenizer", BASE, "--records", 1, "--json")
    verdict = json.loads(printed)
    assert code == 0 and verdict["level"] == "rescored" and verdict["tokenizer"] == runs.fingerprint()
    assert verdict["rescored"]["weights"] == packed.read(submitted).weights and verdict["rescored"]["seed"] > 0
    assert verdict["date"].startswith("20") and verdict["versions"].keys() >= {"torch", "lm-eval"}
