"""RWKU and MUSE: the released evaluation functions' values, which are kept, on a model that is made anew; and off-line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_eval_elude.tasks.rwku import OF_ATTACK
from tests.support import GOLDEN, SHAPES, run, save_checkpoint

approx = partial(pytest.approx, abs=1e-6)
KEPT = json.loads((GOLDEN / "rwku_muse.json").read_text(encoding="utf-8"))
KING = "Stephen King"
TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}<|start_header_id|>{{ turn.role }}<|end_header_id|>\n\n"
    "{{ turn.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def word_model(folder: Path, words: Sequence[str]) -> str:
    """A Llama whose tokens are words, in the shape of Llama-3's tokenizer and template, with weights from a table.

    NumPy's old generator gives the same numbers for good.
    """
    bos, *others, end = SHAPES["llama-3.1"].special
    names = [bos, *others, end, "<unk>", *words]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([bos, *others, end])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=end, pad_token=end, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=fast.eos_token_id, pad_token_id=fast.eos_token_id,
    )  # fmt: skip
    model, table = LlamaForCausalLM(config).eval(), np.random.RandomState(0)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(0.4 * table.standard_normal(weight.shape)))
    return save_checkpoint(folder, model, fast)


def write_rows(folder: Path, rows: dict) -> Path:
    """The rows as the files of a folder, by their names in it."""
    for name, found in rows.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the model, RWKU's files in ``rwku`` and MUSE's in ``muse``."""
    root = tmp_path_factory.mktemp("benchmarks")
    word_model(root / "model", KEPT["words"])
    write_rows(root / "rwku", {name: rows for name, rows in KEPT["rows"].items() if "/" not in name})
    write_rows(root / "muse", {name: rows for name, rows in KEPT["rows"].items() if "/" in name})
    return root


def metadata(place: Path, **more: object) -> dict:
    data = {"rwku_data": str(place / "rwku"), "muse_data": str(place / "muse"), "target": KING}
    return {"pretrained": str(place / "model"), **data, **more}


@pytest.fixture(scope="module")
def scored(place) -> dict:
    return run(["rwku", "muse_news"], "elude", metadata=metadata(place))


def number(found: dict, task: str, metric: str) -> float:
    return found["results"][task][f"{metric},none"]


def test_prompts_stops_and_answers_are_those_of_the_released_functions(scored):
    released, logged = KEPT["rwku"], scored["samples"]
    attacks = {name: iter(logged[name]) for name in OF_ATTACK}
    kinds = [f"rwku_attack_{row['type'].replace('incontext', 'in_context').replace(' ', '_')}"
             for row in KEPT["rows"]["forget_level3"] if row["subject"] == KING]  # fmt: skip
    for level in (1, 2, 3):
        samples = [next(attacks[kind]) for kind in kinds] if level == 3 else logged[f"rwku_forget_level{level}"]
        prompts = [sample["arguments"][-1][0] for sample in samples]
        # Its tokenizer puts a second BOS before these.
        assert prompts == ["<|begin_of_text|>" + text for text in released["forget_prompts"][f"level{level}"]]
        written = [sample["doc"]["generated"].strip() for sample in samples]
        assert written == released["forget_predictions"][f"level{level}"]
        assert {(s["arguments"][-1][1]["max_gen_toks"], *s["arguments"][-1][1]["until"]) for s in samples} == {
            (30, "<|eot_id|>")
        }
    for task, name in (("verbmem", "verbmem_f"), ("knowmem_forget", "knowmem_f"), ("knowmem_retain", "knowmem_r")):
        assert [s["doc"]["generated"] for s in logged[f"muse_news_{task}"]] == KEPT["muse"]["responses"][name]


def test_numbers_are_those_of_the_released_functions(scored):
    released = KEPT["rwku"]
    for level in (1, 2, 3):
        expected = released["forget"][f"level{level}"]
        assert expected > 0 and number(scored, f"rwku_forget_level{level}", "rwku_recall") == approx(expected)
    for level in (1, 2):
        assert number(scored, f"rwku_neighbor_level{level}", "rwku_recall") == approx(
            released["neighbor"][f"level{level}"]
        )
    # What the released code returns as mink20 is Min-K%++.
    for side in ("forget", "retain"):
        for metric, name in (("log_likelihood", "loss"), ("zlib", "zlib"), ("min_k_plus_plus", "mink20")):
            assert number(scored, f"rwku_mia_{side}", metric) == approx(released[f"mia_{side}"][name])
    for task, name in (("verbmem", "verbmem_f"), ("knowmem_forget", "knowmem_f"), ("knowmem_retain", "knowmem_r")):
        assert 100 * number(scored, f"muse_news_{task}", "muse_rouge") == approx(KEPT["muse"][name])
    assert number(scored, "muse_news_privleak", "muse_auc") == approx(KEPT["muse"]["auc"])
    assert 100 * number(scored, "muse_news_privleak", "muse_privleak") == approx(KEPT["muse"]["privleak"])


def test_targets_weigh_the_same_whatever_the_number_of_their_probes(place):
    found = run(["rwku_forget"], "hf", metadata=metadata(place) | {"target": [KING, "neil armstrong"]})
    for level in (1, 2, 3):
        both = [KEPT[key]["forget"][f"level{level}"] for key in ("rwku", "other")]
        assert number(found, f"rwku_forget_level{level}", "rwku_recall") == approx(sum(both) / 2)


def test_the_fixed_evaluators(place, scored):
    fixed = run(["rwku_forget_level1", "muse_news"], "elude", metadata=metadata(
        place, rwku_evaluator="fixed", muse_evaluator="fixed"
    ))  # fmt: skip
    prompt, given = fixed["samples"]["rwku_forget_level1"][0]["arguments"][-1]
    assert prompt == KEPT["rwku"]["forget_prompts"]["level1"][0] and given["until"] == ["<|eot_id|>", "\n"]
    assert fixed["samples"]["muse_news_knowmem_forget"][0]["doc"]["question"].endswith("Who met on Monday?\nAnswer:")
    cut, whole = (found["samples"]["muse_news_verbmem"][0]["doc"]["answer"] for found in (scored, fixed))
    assert whole.startswith(cut) and len(whole[len(cut) :].split()) == 1  # the token that BOS took
