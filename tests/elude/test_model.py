"""The fast backend gives stock ``hf``'s numbers and texts: over architectures, lengths, batches, padding and ranks."""

from __future__ import annotations

import copy
import importlib
import io
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from lm_eval_elude import backend, harness
from lm_eval_elude.backend import checked
from lm_eval_elude.backend.model import EludeLM
from lm_eval_elude.backend.packing import lay_out, plant
from lm_eval_elude.core.chat import Renderer
from tests.support import make_tokenizer, task_manager

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the quick brown fox jumps over a lazy dog . when and where was she born ? he won in 1998 and 2001 the prize ! "
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "initializer_range": 0.4, "head_dim": 8,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 24},
}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<end>"],
    )  # fmt: skip
    return fast


def make(tokenizer: Any, kind: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    options = {**SMALL, **SHAPES.get(kind, {}), "vocab_size": len(tokenizer), **changes}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **options)).eval()


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=0) for a in arguments]  # type: ignore[arg-type]


def both(model: Any, tokenizer: Any, **options: Any) -> tuple[EludeLM, HFLM]:
    fast = EludeLM(model, tokenizer=tokenizer, **options)
    options.pop("batch_tokens", None)
    # Its cache of one-token answers takes "a" + " b c" and "a b" + " c" for one request, and gives one of them wrongly.
    return fast, HFLM(model, tokenizer=tokenizer, logits_cache=False, **options)


CONTEXTS = [
    "when and where was she born ?",
    "he won",
    "the quick brown fox jumps over a lazy dog . when and where was he ?",
]
ANSWERS = [" in 1998", " in 1998 and 2001 .", " in 1998 and she", " the prize", "", " dog \n"]
QUESTIONS = [(c, a) for c in CONTEXTS for a in ANSWERS if a] + [("", "the quick fox"), ("he won \n", "the prize")]


@pytest.mark.parametrize("kind", SHAPES)
def test_same_log_likelihoods_and_texts_as_hf(kind: str, tokenizer: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "lm_eval.elude"):
        fast, stock = both(make(tokenizer, kind), tokenizer)
    assert not [r for r in caplog.records if "ELUDe" in r.message], caplog.text
    requests = asked("loglikelihood", QUESTIONS)
    for (ours, ours_greedy), (theirs, greedy) in zip(
        fast.loglikelihood(requests, disable_tqdm=True), stock.loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert ours_greedy == greedy
    requests = asked("generate_until", [(c, {"until": [".", " the"], "max_gen_toks": 9}) for c in CONTEXTS])
    assert fast.generate_until(requests, disable_tqdm=True) == stock.generate_until(requests, disable_tqdm=True)


def test_probes_texts_are_no_accident(tokenizer: Any) -> None:
    fast, _ = both(make(tokenizer), tokenizer)
    texts = fast.generate_until(
        asked("generate_until", [(c, {"until": [], "max_gen_toks": 9}) for c in CONTEXTS]), True
    )
    assert len(set(texts)) == len(texts) and all(texts)
    assert fast._packs and fast._decodes


words = st.lists(st.sampled_from(TEXT.split()), min_size=1, max_size=12).map(" ".join)


@given(
    contexts=st.lists(words, min_size=1, max_size=4),
    answers=st.lists(words.map(lambda w: " " + w), min_size=1, max_size=5),
    batch_tokens=st.integers(1, 200),
    batch_size=st.integers(1, 5),
    most=st.integers(1, 12),
    until=st.lists(st.sampled_from(["a", " the", ".", "</s>", "he won", "\n\n"]), max_size=2),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_lengths_and_batches(
    pair: tuple[EludeLM, HFLM], contexts: list[str], answers: list[str], batch_tokens: int, batch_size: int, most: int,
    until: list[str],
) -> None:  # fmt: skip
    fast, stock = pair
    fast.batch_tokens, stock.batch_size_per_gpu = batch_tokens, batch_size
    requests = asked("loglikelihood", [(c, a) for c in contexts for a in answers])
    ours, theirs = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (fast, stock))
    assert [v for v, _ in ours] == pytest.approx([v for v, _ in theirs], abs=1e-4)
    assert [g for _, g in ours] == [g for _, g in theirs]
    # A text stop ends a row's text, but in stock hf not its decoding; the text is the same.
    requests = asked("generate_until", [(c, {"until": until, "max_gen_toks": most}) for c in contexts])
    assert fast.generate_until(requests, disable_tqdm=True) == stock.generate_until(requests, disable_tqdm=True)


@pytest.fixture(scope="module")
def pair(tokenizer: Any) -> tuple[EludeLM, HFLM]:
    return both(make(tokenizer), tokenizer)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.sampled_from([0, 1, 64])
)
def test_trees_spell_their_sequences_and_branches_do_not_see_each_other(sequences: list[list[int]], width: int) -> None:
    trees = plant(sequences, width, 40)
    assert sorted(member for tree in trees for member in tree.members) == list(range(len(sequences)))
    layout = lay_out(trees, torch.device("cpu"))
    for row, tree in enumerate(trees):
        for member, path in zip(tree.members, tree.paths, strict=True):
            assert layout.tokens[row, path].tolist() == sequences[member]
            assert layout.depths[row, path].tolist() == list(range(len(path)))
            for depth, node in enumerate(path):
                assert layout.sees[row, node].nonzero()[:, 0].tolist() == path[: depth + 1]
        # A prefix is one node of its tree, however many sequences begin with it.
        assert len(tree.tokens) == len(
            {tuple(sequences[m][: i + 1]) for m in tree.members for i in range(len(sequences[m]))}
        )
    if width == 0:
        assert len(trees) == len(sequences)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=4))
def test_what_shares_an_opening_becomes_one_tree(sequences: list[list[int]]) -> None:
    """Where tokens are dear (a wide model) and pairs of tokens are not: as many trees as there are first tokens."""
    trees = plant(sequences, 1 << 20, 40)
    assert len(trees) == len({sequence[0] for sequence in sequences})
    assert sum(len(tree.tokens) for tree in trees) == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})
    assert all(len(tree.tokens) <= 5 or len(tree.members) == 1 for tree in plant(sequences, 1 << 20, 5))


def test_bfloat16_is_as_near_as_its_noise(tokenizer: Any) -> None:
    exact, _ = both(make(tokenizer), tokenizer)
    fast, stock = both(make(tokenizer).to(torch.bfloat16), tokenizer)
    assert fast._packs
    requests = asked("loglikelihood", QUESTIONS)
    values = [torch.tensor([v for v, _ in lm.loglikelihood(requests, True)]) for lm in (exact, fast, stock)]
    ours, theirs = ((v - values[0]).abs().mean() for v in values[1:])
    assert ours <= 1.5 * theirs + 1e-3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention: str, tokenizer: Any) -> None:
    model = make(tokenizer)
    model.set_attn_implementation(attention)
    fast, stock = both(model, tokenizer)
    assert fast._packs and fast._decodes
    requests = asked("loglikelihood", QUESTIONS)
    ours, theirs = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (fast, stock))
    assert [v for v, _ in ours] == pytest.approx([v for v, _ in theirs], abs=1e-4)


def test_an_architecture_that_cannot_pack_goes_the_stock_way_with_one_line(tokenizer: Any, caplog: Any) -> None:
    """Bloom's positions are its attention biases: it takes no positions, so packed rows would be wrong."""
    model = make(tokenizer, "bloom", hidden_size=32, n_layer=2, n_head=4)
    with caplog.at_level(logging.WARNING, "lm_eval.elude"):
        fast, stock = both(model, tokenizer)
    (line,) = (r.message for r in caplog.records if r.message.startswith("ELUDe"))
    assert "log-likelihoods and generation of this model go the stock way" in line
    requests = asked("loglikelihood", QUESTIONS)
    ours, theirs = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (fast, stock))
    assert [v for v, _ in ours] == pytest.approx([v for v, _ in theirs], abs=1e-5)
    scores = fast.token_logprobs(asked("token_logprobs", QUESTIONS), disable_tqdm=True)
    assert [sum(s.log_probs) for s in scores] == pytest.approx([v for v, _ in theirs], abs=1e-4)


def test_an_encoder_decoder_goes_the_stock_way(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "t5", vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, eos_token_id=1,
        pad_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    fast, stock = both(transformers.AutoModelForSeq2SeqLM.from_config(config).eval(), tokenizer)
    assert not hasattr(fast.rank, "serves")  # so that elude_mia does not ask for token log-probabilities
    requests = asked("loglikelihood", QUESTIONS[:6])
    assert fast.loglikelihood(requests, disable_tqdm=True) == stock.loglikelihood(requests, disable_tqdm=True)
    requests = asked("generate_until", [(c, {"until": [], "max_gen_toks": 5}) for c in CONTEXTS])
    assert fast.generate_until(requests, disable_tqdm=True) == stock.generate_until(requests, disable_tqdm=True)


def test_a_mask_that_is_ignored_is_noticed(tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(EludeLM, "_mask", lambda self, sees: None)
    assert not both(make(tokenizer), tokenizer)[0]._packs


def test_generation_settings_that_act_go_the_stock_way(tokenizer: Any, caplog: Any) -> None:
    model = make(tokenizer)
    model.generation_config.repetition_penalty = 1.9
    with caplog.at_level(logging.WARNING, "lm_eval.elude"):
        fast, stock = both(model, tokenizer)
    (line,) = (r.message for r in caplog.records if r.message.startswith("ELUDe"))
    assert "generation_config sets repetition_penalty" in line and fast._packs
    requests = asked("generate_until", [(c, {"until": [], "max_gen_toks": 12}) for c in CONTEXTS])
    texts = fast.generate_until(requests, disable_tqdm=True)
    assert texts == stock.generate_until(requests, disable_tqdm=True)
    model.generation_config.repetition_penalty = None
    assert texts != stock.generate_until(requests, disable_tqdm=True)


def test_sampling_goes_the_stock_way(pair: tuple[EludeLM, HFLM], monkeypatch: Any) -> None:
    fast, stock = pair
    monkeypatch.setattr(fast, "_greedy", lambda *_: pytest.fail("decoded greedily"))
    sampled = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5}
    texts = []
    for lm in (fast, stock):
        torch.manual_seed(1)
        lm.batch_size_per_gpu = 1
        texts.append(lm.generate_until(asked("generate_until", [(c, sampled) for c in CONTEXTS]), disable_tqdm=True))
    assert texts[0] == texts[1]


def test_a_stop_that_is_a_special_token_ends_a_row_alone(tokenizer: Any) -> None:
    """Special tokens are not in the text, so the row must end by itself; as stock hf does with batch size 1."""
    model = make(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids("<end>")] *= 2.5
    fast, stock = both(model, tokenizer, batch_size=1)
    requests = asked("generate_until", [(w, {"until": ["<end>"], "max_gen_toks": 20}) for w in TEXT.split()])
    texts = fast.generate_until(requests, disable_tqdm=True)
    assert texts == stock.generate_until(requests, disable_tqdm=True)
    assert len({len(tokenizer.encode(t)) for t in texts}) > 3


def test_what_the_answers_showed_is_not_decoded_again(tokenizer: Any, monkeypatch: Any) -> None:
    fast, stock = both(make(tokenizer), tokenizer)
    requests = asked("generate_until", [(c, {"until": [], "max_gen_toks": 9}) for c in CONTEXTS])
    texts = stock.generate_until(requests, disable_tqdm=True)
    answers = [(c, stock.tok_decode(fast._greedy([stock.tok_encode(c)], (), 9)[0], False)) for c in CONTEXTS]
    fast.loglikelihood(asked("loglikelihood", [*answers, *QUESTIONS]), disable_tqdm=True)
    steps = []
    forward = fast.model.forward
    monkeypatch.setattr(fast.model, "forward", lambda *a, **k: steps.append(1) or forward(*a, **k))
    assert fast.generate_until(requests, disable_tqdm=True) == texts
    drafted = len(steps)
    assert fast.generate_until(requests, disable_tqdm=True) == texts and not fast._drafts
    assert drafted < len(steps) - drafted


def spelling(tokenizer: Any, prompt: str, text: str) -> Any:
    """A GPT-2 that says this text after a prompt of that length: its positions name the next token."""
    model = make(tokenizer, "gpt2", hidden_size=len(tokenizer), num_hidden_layers=1)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    first = len(tokenizer.encode(prompt)) - 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "c_proj" in name or "wpe" in name:
                weight.zero_()
        model.transformer.wte.weight.copy_(torch.eye(len(tokenizer)))
        for place, token in enumerate(ids, first):
            model.transformer.wpe.weight[place, token] = 10
    return model


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" Paris\nQuestion: What?", " Paris\n"), (" Paris\n \n Question: What?", " Paris\n \n "),
     (" Paris\n\nWhich is in France.", " Paris"), (" A question: which?\n", " A question: which?\n")],
)  # fmt: skip
def test_a_base_models_answer_ends_at_its_next_question_or_a_blank_line(text: str, answer: str, tokenizer: Any) -> None:
    prompt = "Question: where ?\nAnswer:"
    requests = asked("generate_until", [(prompt, {"until": Renderer(tokenizer).stop, "max_gen_toks": 40})])
    fast, stock = both(spelling(tokenizer, prompt, text), tokenizer)
    assert fast._decodes
    for lm in (fast, stock):
        assert lm.generate_until(requests, disable_tqdm=True) == [answer]


def test_a_long_generation_shows_how_far_it_is(pair: tuple[EludeLM, HFLM], monkeypatch: Any) -> None:
    shown: list[str] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, *args: Any, **kwargs: Any) -> bool:
            shown.append(str(self))
            return True

    monkeypatch.setattr(backend.model, "tqdm", Bar)
    pair[0].batch_tokens = 1000
    pair[0].generate_until(asked("generate_until", [(c, {"until": [], "max_gen_toks": 40}) for c in CONTEXTS]))
    (within,) = (line for line in shown if "token 32 of at most 40, 3 texts under way" in line)
    assert "0/3" in within


def test_the_check_at_load_is_short_and_runs_once_for_a_model(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checked.constants, "HF_HOME", str(tmp_path / "home"))
    tokens: list[int] = []
    forward = transformers.LlamaForCausalLM.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.append((args[0] if args else kwargs["input_ids"]).numel())
        return forward(self, *args, **kwargs)

    def load(name: str, passes: bool = True, **changes: Any) -> int:
        """Forwards that loading a model took."""
        if not (folder := tmp_path / name).exists():
            make(tokenizer, **changes).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        tokens.clear()
        assert EludeLM(str(folder), device="cpu")._decodes == passes
        return len(tokens)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", counted)
    assert 0 < load("a") <= 14 and sum(tokens) < 200
    assert load("a") == load("b", initializer_range=0.4) == 0  # b: the same shape
    assert load("c", num_hidden_layers=2) > 0
    monkeypatch.setattr(checked, "version", lambda name: "another")
    assert load("a") > 0 and load("a") == 0
    monkeypatch.setattr(EludeLM, "_mask", lambda self, sees: None)
    assert load("d", False, num_hidden_layers=1) > 0 and load("d", False) > 0  # what is not passed leaves no record


def test_out_of_memory_halves_the_batch_with_a_line(tokenizer: Any, caplog: Any, monkeypatch: Any) -> None:
    fast, stock = both(make(tokenizer), tokenizer, batch_tokens=400)
    requests = asked("loglikelihood", QUESTIONS)
    texts = asked("generate_until", [(c, {"until": [], "max_gen_toks": 9}) for c in CONTEXTS])
    wanted = stock.loglikelihood(requests, disable_tqdm=True), stock.generate_until(texts, disable_tqdm=True)
    forward = fast.model.forward

    def small(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[0] > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "lm_eval.elude"):
        patch.setattr(fast.model, "forward", small)
        found = fast.loglikelihood(requests, disable_tqdm=True), fast.generate_until(texts, disable_tqdm=True)
    assert [v for v, _ in found[0]] == pytest.approx([v for v, _ in wanted[0]], abs=1e-4)
    assert found[1] == wanted[1]
    lines = [r.message for r in caplog.records if "out of memory" in r.message]
    assert lines and f"now {fast.batch_tokens} tokens a batch" in lines[-1]


@pytest.mark.parametrize("given_tokens", ["many", "0", -3])
def test_bad_batch_tokens(given_tokens: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"batch_tokens=.* must be a positive whole number"):
        EludeLM(make(tokenizer), tokenizer=tokenizer, batch_tokens=given_tokens)


def test_token_log_probabilities_against_a_plain_forward(pair: tuple[EludeLM, HFLM], tokenizer: Any) -> None:
    fast, _ = pair
    for (context, answer), score in zip(
        QUESTIONS[:8], fast.token_logprobs(asked("token_logprobs", QUESTIONS[:8]), disable_tqdm=True), strict=True
    ):
        ids, start = tokenizer.encode(context + answer), len(tokenizer.encode(context))
        with torch.no_grad():
            logs = fast.model(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
        assert score.log_probs == pytest.approx(logs[range(len(ids) - start), ids[start:]].tolist(), abs=1e-4)
        mean = (logs.exp() * logs).sum(-1)
        spread = ((logs.exp() * logs.square()).sum(-1) - mean.square()).sqrt()
        assert score.means == pytest.approx(mean.tolist(), abs=1e-4)
        assert score.stds == pytest.approx(spread.tolist(), abs=1e-3)
        assert score.greedy == (logs.argmax(-1) == torch.tensor(ids[start:])).tolist()


def test_the_harness_finds_it_and_still_finds_its_own() -> None:
    assert get_model("elude") is EludeLM
    assert get_model("hf") is HFLM


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: Any) -> str:
    """A checkpoint with a chat template whose prompts end in white space, as Llama-3.1's do."""
    place = tmp_path_factory.mktemp("model")
    make(tokenizer, max_position_embeddings=1024).save_pretrained(place)
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}{{ m['role'] }}\n\n{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant\n\n{% endif %}"
    )
    chatty.save_pretrained(place)
    return str(place)


def test_torch_built_for_an_accelerator_that_is_not_there(folder: str, monkeypatch: Any) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert EludeLM(folder).device.type == "cpu"


def evaluated(
    folder: str, model: str, task: str, limit: int = 12, arguments: dict[str, str] | None = None, **metadata: Any
) -> Any:
    metadata = {"pretrained": folder, "dataset": "mini", "target": "Cristiano Ronaldo", **metadata}
    return lm_eval.simple_evaluate(
        model=model, model_args={"pretrained": folder, **(arguments or {})}, tasks=[task], device="cpu", limit=limit,
        bootstrap_iters=0, gen_kwargs="max_gen_toks=4", task_manager=task_manager(metadata),
    )  # fmt: skip


def scored(folder: str, model: str, task: str, **metadata: Any) -> dict[str, Any]:
    results = evaluated(folder, model, task, **metadata)
    return {k.removesuffix(",none"): v for k, v in results["results"][task].items() if k.endswith(",none")}


def test_membership_attacks_need_this_backend_and_the_loss_stays_the_same(folder: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "lm_eval.elude"):
        stock = scored(folder, "hf", "elude_mia")
    assert "only --model elude gives token log-probabilities" in caplog.text
    fast = scored(folder, "elude", "elude_mia", mia_reference=folder)
    more = {"mia_zlib_auc", "mia_min_k_auc", "mia_min_k_plus_plus_auc", "mia_reference_auc"}
    assert more == set(fast) - set(stock) - {f"{name}_stderr" for name in fast}
    for name in set(stock) & set(fast):
        assert fast[name] == pytest.approx(stock[name], abs=1e-6, nan_ok=True) or fast[name] == stock[name]
    assert fast["mia_reference_auc"] == 0.5  # the model is its own reference: all gaps are 0
    assert all(0 <= fast[name] <= 1 for name in more)


def test_a_reference_with_another_tokenizer_skips_the_prompts_white_space_in_its_own_tokens(
    folder: str, tokenizer: Any, tmp_path: Path
) -> None:
    """Against plain forwards that count the tokens behind the prompt by where they stand in the text."""
    other = make_tokenizer("base")
    assert [len(t.encode("\n\n", add_special_tokens=False)) for t in (tokenizer, other)] == [2, 1]
    models = {folder: make(tokenizer, max_position_embeddings=1024), str(tmp_path): make(other, num_hidden_layers=1)}
    other.save_pretrained(tmp_path)
    models[str(tmp_path)].save_pretrained(tmp_path)
    told = evaluated(folder, "elude", "elude_mia", limit=2, mia_reference=str(tmp_path))

    def mean_log_prob(name: str, prompt: str, answer: str) -> float:
        spelt = transformers.AutoTokenizer.from_pretrained(name)(prompt + answer, return_offsets_mapping=True)
        ids, first = spelt["input_ids"], [start >= len(prompt) for start, _ in spelt["offset_mapping"]].index(True)
        with torch.no_grad():
            logs = models[name](torch.tensor([ids])).logits[0].log_softmax(-1)
        return float(logs[range(first - 1, len(ids) - 1), ids[first:]].mean())

    renderer = Renderer(transformers.AutoTokenizer.from_pretrained(folder))
    for sample in told["samples"]["elude_mia"]:
        doc, gaps = sample["doc"], []
        for side in ("", "paraphrased_"):
            pair = renderer.prompt(doc[f"{side}question"]), renderer.answer(doc[f"{side}answer"])
            gaps.append(mean_log_prob(folder, *pair) - mean_log_prob(str(tmp_path), *pair))
        assert sample["mia_reference_auc"] == pytest.approx(gaps[0] - gaps[1], abs=1e-4)


def test_sixteen_bits_are_warned_of_where_they_cost_precision(folder: str, caplog: Any) -> None:
    for model, arguments, warned in [
        ("hf", {"dtype": "bfloat16"}, True),
        ("hf", {"dtype": "bfloat16", "softmax_dtype": "float32"}, False),
        ("hf", {"dtype": "float32"}, False),
        ("elude", {"dtype": "bfloat16"}, False),
    ]:
        harness._say.cache_clear()
        caplog.set_level("WARNING", logger="lm_eval.elude")
        caplog.clear()
        evaluated(folder, model, "elude_mia", 1, arguments)
        lines = [r.message for r in caplog.records if "softmax_dtype=float32" in r.message]
        assert len(lines) == warned, (model, arguments)


def test_what_goes_the_stock_way_is_summed_in_float32(tokenizer: Any) -> None:
    fast, stock = both(make(tokenizer).to(torch.bfloat16), tokenizer)
    fast._packs = False
    requests = asked("loglikelihood", QUESTIONS)
    ours, theirs = (lm.loglikelihood(requests, True) for lm in (fast, stock))
    stock.softmax_dtype = torch.float32
    assert ours == stock.loglikelihood(requests, True) != theirs


RANKS = """
import json, sys
import lm_eval
from lm_eval_elude.backend.model import EludeLM

seen = []
score = EludeLM._loglikelihood_tokens

def counted(self, requests, *args, **kwargs):
    seen.append(len(requests))
    return score(self, requests, *args, **kwargs)

EludeLM._loglikelihood_tokens = counted
results = lm_eval.simple_evaluate(
    model="elude", model_args={"pretrained": sys.argv[1]}, tasks=["elude_forget"], device="cpu", limit=12,
    metadata={"pretrained": sys.argv[1], "dataset": "mini", "target": "Cristiano Ronaldo"},
    gen_kwargs="max_gen_toks=4", bootstrap_iters=0,
)
print("@" + json.dumps([max(seen), results and results["results"]["elude_forget"]]), flush=True)
"""


def test_each_rank_scores_its_share_on_cpu(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    assert [count for count, _ in told] == [6 * 8, 6 * 8]  # of 12 records: seven answers and the prompt's white space
    (together,) = (result for _, result in told if result)
    for name, value in scored(folder, "elude", "elude_forget").items():
        if isinstance(value, float):
            assert together[f"{name},none"] == pytest.approx(value, abs=1e-6)


def test_the_benchmark_compares_every_suite_with_stock(tmp_path: Path, monkeypatch: Any) -> None:
    """On the bundled model; membership inference asks this backend in another way, and is compared all the same."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scoring = importlib.import_module("scoring")
    for name in ("OMP_NUM_THREADS", "HF_HOME", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # set back after the benchmark has set them

    def start(*arguments: Any) -> Any:  # as threads: two interpreters would take longer than all the rest
        ours, theirs = multiprocessing.Pipe()
        threading.Thread(target=scoring.arm, args=(theirs, *arguments), daemon=True).start()
        assert ours.poll(120)  # transformers loads one model at a time
        return ours

    monkeypatch.setattr(scoring, "start", start)
    told, model = tmp_path / "told.json", str(ROOT / "lm_eval_elude" / "mini" / "tiny")
    options = ["--model", model, "--limit=1", "--parts=2", "--new-tokens=3", "--json", str(told)]
    monkeypatch.setattr(sys, "argv", ["scoring.py", *options])
    assert scoring.main() == 0
    report = json.loads(told.read_text())
    assert set(report["compared"]) == {"plain", "attacks", "mia", "generation", "utility", "utility generation"}
    for suite, found in report["compared"].items():
        assert found["requests"] >= min(2, report["requests"][suite]) and found["nats"] < 1e-3 and not found["texts"]


def test_the_benchmarks_comparison_sees_a_difference(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    compare = importlib.import_module("scoring").compare
    stock = [("q", "a", -1.0), ("q", " ", -0.5), ("q", "b", -2.0), ("p", "", "text")]
    assert compare(stock, [("q", "a", -1.5), ("q", "b", -2.0), ("p", "", "other")]) == (3, 0.5, 1)
    assert compare(stock, [("r", "a", -1.0)]) == (0, 0.0, 0)
