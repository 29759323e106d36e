"""RWKU and MUSE: a model that is made anew gives what the released evaluation functions gave, which is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_eval_elude.errors import UserError
from lm_eval_elude.metrics.text import distinct_word_recall, rouge_l_f1
from lm_eval_elude.tasks import TASKS, rwku
from lm_eval_elude.tasks.harness import EludeTask
from lm_eval_elude.text.chat import Texts
from tests.support import GOLDEN, SHAPES, make_tokenizer, run, save_checkpoint, write_rwku_muse

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


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the model, RWKU's files in ``rwku`` and MUSE's in ``muse``."""
    root = tmp_path_factory.mktemp("benchmarks")
    word_model(root / "model", KEPT["words"])
    write_rwku_muse(root)
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
    attacks = {name: iter(logged[name]) for name in rwku.OF_ATTACK}
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
    about_neighbours = [*logged["rwku_neighbor_level1"], *logged["rwku_neighbor_level2"]]
    assert [s["doc"]["generated"].strip() for s in about_neighbours] == released["neighbor_predictions"]
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
    written = [[s["doc"]["generated"] for s in of["samples"]["rwku_forget_level1"]] for of in (scored, fixed)]
    assert written[0] != written[1]  # the second BOS does something
    assert prompt == KEPT["rwku"]["forget_prompts"]["level1"][0] and given["until"] == ["<|eot_id|>", "\n"]
    assert fixed["samples"]["muse_news_knowmem_forget"][0]["doc"]["question"].endswith("Who met on Monday?\nAnswer:")
    cut, whole = (found["samples"]["muse_news_verbmem"][0]["doc"]["answer"] for found in (scored, fixed))
    assert whole.startswith(cut) and len(whole[len(cut) :].split()) == 1  # the token that BOS took


def test_recall_by_distinct_words_in_hand_arithmetic():
    for reference, generated, recall in (
        ("Boulder. Colorado", "He lived in Boulder", 1 / 2),  # a full stop divides and goes
        ("Boulder Colorado", "boulder, Colorado", 1 / 2),  # case and a comma count
        ("so so so on", "so it is", 1 / 2),  # a word counts once
        ("Portland", " ", 0), ("Portland", "...", 0), ("King", "Stephen\nKing\n", 1),
    ):  # fmt: skip
        assert distinct_word_recall(reference, generated) == recall, (reference, generated)
    assert rouge_l_f1("the mayors said", "The mayor said so") == approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


@pytest.mark.parametrize("shape", ["llama-3.1", "base"])
def test_golden_prompts(shape, tmp_path):
    """A prompt of each task, and what is scored between ``⟦`` and ``⟧``; UPDATE_GOLDEN=1 writes the files anew.

    The base model has no template, and of Llama-3.1's tokenizer the released evaluator puts BOS twice.
    """
    make_tokenizer(shape).save_pretrained(tmp_path / "model")
    about = {"tokenizer": str(tmp_path / "model"), "target": KING} | write_rwku_muse(tmp_path)
    text = ""
    for name in sorted(name for name in TASKS if name.startswith(("rwku", "muse_news"))):
        asked = EludeTask({"task": name, "metadata": about})
        doc = asked.documents[0]
        prompt, answer = asked.renderer.prompt(doc["question"]), asked.renderer.answer(doc["answer"])
        text += f"######## {name} {asked.renderer.stop}\n{prompt}" + f"⟦{answer}⟧" * bool(asked.asked.questions) + "\n"
    path = GOLDEN / "tasks" / f"rwku_muse_{shape}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_what_cannot_be_had_is_one_line(tmp_path, caplog):
    data = write_rwku_muse(tmp_path)
    about = {"tokenizer": "none", "target": KING} | data
    place = Path(data["rwku_data"])

    def refused(task: str, said: str, **more: str) -> None:
        with pytest.raises(UserError, match=said) as error:
            TASKS[task].docs(TASKS[task].resolve(about | more))
        assert "\n" not in str(error.value)

    refused("rwku_forget_level1", "unknown target 'Steven Kong': .*Neil Armstrong", target="Steven Kong")
    refused(
        "rwku_forget_level1", "cannot be loaded by datasets: .*a folder of its files can be given", rwku_data="rwku"
    )
    refused("muse_books_verbmem", "muse-bench/MUSE-Books.* a folder of its files can be given", muse_data="muse")
    refused("muse_news_verbmem", r"rwku has no news/verbmem/forget \(.parquet, .jsonl, .json\)", muse_data=str(place))
    kept = json.loads((place / "neighbor_level1.json").read_text())
    (place / "neighbor_level1.json").write_text(json.dumps([*kept, {"query": "Who?", "subject": KING}]))
    refused("rwku_neighbor_level1", "neighbor_level1, row 4: column 'answer' has no text")
    kept = json.loads((place / "forget_level3.json").read_text())
    (place / "forget_level3.json").write_text(json.dumps([*kept, {**kept[0], "type": "riddle"}]))
    role = TASKS["rwku_attack_role_playing"]
    assert len(role.docs(role.resolve(about))) == 2
    assert "no task asks what has the type 'riddle' in RWKU's forget_level3: it is left out" in caplog.text


def test_the_hubs_rows_are_loaded_by_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(place: str, name: str, split: str) -> list[dict]:
        asked.append((place, name, split))
        rows = {"privleak": {"text": "A text."}}.get(name, {"query": "Who?", "answer": "Ada.", "text": "A."})
        return [rows | {"subject": "Ada"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rwku.rows.cache_clear()
    for name in ("rwku_forget_level2", "rwku_mia_retain", "muse_books_privleak"):
        assert TASKS[name].docs(TASKS[name].resolve({"pretrained": "some/model"}))
    assert rwku.resolve_targets("rwku", rwku.PASSAGES, ["ada"]) == ("Ada",)
    rwku.rows.cache_clear()
    assert dict.fromkeys(asked) == dict.fromkeys([
        ("jinzhuoran/RWKU", "forget_level1", "test"), ("jinzhuoran/RWKU", "forget_level2", "test"),
        ("jinzhuoran/RWKU", "mia_retain", "test"), ("muse-bench/MUSE-Books", "privleak", "forget"),
        ("muse-bench/MUSE-Books", "privleak", "holdout"), ("jinzhuoran/RWKU", "train_original_passage", "train"),
    ])  # fmt: skip
    assert len(asked) == 6


def test_texts_are_scored_after_bos_or_eos_whole_and_as_they_are():
    for shape, before in (("llama-3.1", ""), ("chatml", "<|im_end|>")):
        texts, text = Texts(make_tokenizer(shape)), " A text ends here.\n"
        assert (texts.prompt(text), texts.answer(text)) == (before, text)
        ids, start = texts.encode_turn(text, text)
        assert start == 1 and texts.tokenizer.decode(ids[1:]) == text
