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

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import PromptTuningConfig, get_peft_model
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from lm_eval_elude.errors import UserError
from lm_eval_elude.model import backend, limits, scorer
from lm_eval_elude.model.backend import EludeLM
from lm_eval_elude.model.limits import cuts_draws
from lm_eval_elude.model.scorer import packing_fault
from lm_eval_elude.tasks import harness
from lm_eval_elude.text.chat import Renderer
from tests.model.shapes import SHAPES, make
from tests.support import ROOT, TASK_CONFIGS, called, make_tokenizer, run, save_checkpoint

TEXT = "the quick brown fox jumps over a lazy dog . when and where was she born ? he won in 1998 and 2001 the prize ! "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<s>", "</s>", "<pad>", "<end>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT] * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>", additional_special_tokens=["<end>"]
    )


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=0) for a in arguments]  # type: ignore[arg-type]


def both(model: Any, tokenizer: Any, **options: Any) -> tuple[EludeLM, HFLM]:
    fast = EludeLM(model, tokenizer=tokenizer, **options)
    options.pop("batch_tokens", None)
    # Its cache of one-token answers takes "a" + " b c" and "a b" + " c" for one request, and gives one of them wrongly.
    return fast, HFLM(model, tokenizer=tokenizer, logits_cache=False, **options)


@pytest.fixture(scope="module")
def pair(tokenizer: Any) -> tuple[EludeLM, HFLM]:
    return both(make(len(tokenizer)), tokenizer)


CONTEXTS = [
    "when and where was she born ?",
    "he won",
    "the quick brown fox jumps over a lazy dog . when and where was he ?",
]
ANSWERS = [" in 1998", " in 1998 and 2001 .", " in 1998 and she", " the prize", " dog \n"]
QUESTIONS = [(c, a) for c in CONTEXTS for a in ANSWERS] + [("", "the quick fox"), ("he won \n", "the prize")]


def values(lm: HFLM, pairs: list[tuple[str, str]] = QUESTIONS) -> tuple[list[float], list[bool]]:
    """Log-likelihoods, and whether each answer is greedy."""
    log_likelihoods, greedy = zip(*lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True), strict=True)
    return list(log_likelihoods), list(greedy)


def texts(lm: HFLM, contexts: list[str] = CONTEXTS, most: int = 9, **given: Any) -> list[str]:
    arguments = [(context, {"until": [], "max_gen_toks": most, **given}) for context in contexts]
    return lm.generate_until(requests("generate_until", arguments), disable_tqdm=True)


def agree(fast: EludeLM, stock: HFLM, pairs: list[tuple[str, str]] = QUESTIONS) -> None:
    ours, theirs = values(fast, pairs), values(stock, pairs)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-4) and ours[1] == theirs[1]


@pytest.fixture
def lines(caplog: Any) -> Any:
    """What the backend said since the test began."""
    caplog.set_level(logging.WARNING, "lm_eval.elude")
    return lambda: [record.message for record in caplog.records if record.message.startswith("ELUDe")]


@pytest.mark.parametrize("kind", SHAPES)
def test_same_log_likelihoods_and_texts_as_hf(kind: str, tokenizer: Any, lines: Any) -> None:
    fast, stock = both(make(len(tokenizer), kind), tokenizer)
    assert fast._packs and fast._decodes and not lines()
    agree(fast, stock)
    written = texts(fast)
    assert len({*written}) > 1 and all(written)
    assert texts(fast, until=[".", " the"]) == texts(stock, until=[".", " the"])


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
    agree(fast, stock, [(c, a) for c in contexts for a in answers])
    # A row by itself: among others hf goes on after a stop that the last tokens spell and the whole text does not.
    stock.batch_size_per_gpu = 1
    assert texts(fast, contexts, most, until=until) == texts(stock, contexts, most, until=until)


def test_bfloat16_is_as_near_as_its_noise(pair: tuple[EludeLM, HFLM], tokenizer: Any) -> None:
    fast, stock = both(make(len(tokenizer)).to(torch.bfloat16), tokenizer)
    assert fast._packs
    exact, ours, theirs = (
        torch.tensor(values(lm)[0]) for lm in (both(make(len(tokenizer)), tokenizer)[0], fast, stock)
    )
    assert (ours - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean() + 1e-3
    fast._packs = False  # what goes the stock way is summed in float32
    stock_way = values(fast)
    assert stock_way != values(stock)
    stock.softmax_dtype = torch.float32
    assert stock_way == values(stock)


def test_an_architecture_that_cannot_pack_goes_the_stock_way_with_one_line(tokenizer: Any, lines: Any) -> None:
    """Bloom's positions are its attention biases: it takes no positions, so packed rows would be wrong."""
    fast, stock = both(make(len(tokenizer), "bloom", hidden_size=32, n_layer=2, n_head=4), tokenizer)
    (line,) = lines()
    assert "log-likelihoods and generation of this model go the stock way" in line
    agree(fast, stock)
    scores = fast.token_logprobs(requests("token_logprobs", QUESTIONS[:-1]), disable_tqdm=True)
    assert [sum(s.log_probs) for s in scores] == pytest.approx(values(stock, QUESTIONS[:-1])[0], abs=1e-4)


def test_a_model_whose_tokens_cannot_be_scored_does_not_serve_them(
    tokenizer: Any, lines: Any, monkeypatch: Any
) -> None:
    """As where its layers lie on devices that the probe does not find together."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("indices should be on the same device")

    monkeypatch.setattr("lm_eval_elude.model.backend.answer_logits", fail)
    monkeypatch.setattr("lm_eval_elude.model.scorer.answer_logits", fail)
    fast, stock = both(make(len(tokenizer)), tokenizer)
    assert not hasattr(fast.rank, "serves") and any("no log-probabilities of single tokens" in line for line in lines())
    agree(fast, stock)


@pytest.mark.parametrize("size", ["auto", "auto:4"])
def test_a_rest_that_goes_the_stock_way_needs_no_batch_size_of_its_own(tokenizer: Any, size: str) -> None:
    model = make(len(tokenizer), "gemma3_text")
    fast, stock = EludeLM(pretrained=model, tokenizer=tokenizer, batch_size=size), both(model, tokenizer)[1]
    long = [("he won " * 20, " the prize")]  # beyond the window
    agree(fast, stock, QUESTIONS[:4] + long)
    assert texts(fast, [*CONTEXTS, long[0][0]]) == texts(stock, [*CONTEXTS, long[0][0]])
    assert fast.batch_size_per_gpu == "auto"


def test_an_encoder_decoder_goes_the_stock_way(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "t5", vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, eos_token_id=1,
        pad_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    fast, stock = both(transformers.AutoModelForSeq2SeqLM.from_config(config).eval(), tokenizer)
    assert not hasattr(fast.rank, "serves")  # so that elude_mia does not ask for token log-probabilities
    agree(fast, stock, QUESTIONS[:6])
    assert texts(fast) == texts(stock)


def test_generation_settings_that_act_go_the_stock_way(tokenizer: Any, lines: Any) -> None:
    model = make(len(tokenizer))
    model.generation_config.repetition_penalty = 1.9
    fast, stock = both(model, tokenizer)
    (line,) = lines()
    assert "generation_config sets repetition_penalty" in line and fast._packs
    penalised = texts(fast)
    assert penalised == texts(stock)
    model.generation_config.repetition_penalty = None
    assert penalised != texts(stock)


def test_sampling_goes_the_stock_way(pair: tuple[EludeLM, HFLM], monkeypatch: Any) -> None:
    monkeypatch.setattr(backend, "decode", lambda *_: pytest.fail("decoded greedily"))
    sampled = []
    for lm in pair:
        torch.manual_seed(1)
        lm.batch_size_per_gpu = 1
        sampled.append(texts(lm, do_sample=True, temperature=1.5))
    assert sampled[0] == sampled[1]


def test_draws_from_the_whole_vocabulary_are_those_of_the_models_distribution(pair: tuple[EludeLM, HFLM]) -> None:
    """Of two tokens after one prompt: the frequencies of 4,000 draws against a plain forward."""
    fast, _ = pair
    prompt = fast.tok_encode(CONTEXTS[0])
    torch.manual_seed(0)
    drawn = [tuple(ids) for ids in backend.decode(fast.model, fast.tokenizer, [prompt] * 4000, (), 2, 1000, 1.5)]
    with torch.no_grad():
        first = torch.softmax(fast.model(torch.tensor([prompt])).logits[0, -1] / 1.5, -1)
        (likeliest,) = torch.topk(first, 1).indices.tolist()
        second = torch.softmax(fast.model(torch.tensor([[*prompt, likeliest]])).logits[0, -1] / 1.5, -1)
    for tokens, shares in (
        ([ids[0] for ids in drawn], first),
        ([ids[1] for ids in drawn if ids[0] == likeliest and len(ids) > 1], second),
    ):
        expected = shares.double().numpy() * len(tokens)
        often = expected >= 5
        counts = np.bincount(tokens, minlength=len(expected))
        seen, hoped = [[*x[often], x[~often].sum()] for x in (counts, expected)]
        assert stats.chisquare(seen, np.array(hoped) * sum(seen) / sum(hoped)).pvalue > 1e-3


def test_the_harness_draws_each_answer_by_itself_and_the_same_ones_for_a_seed(pair: tuple[EludeLM, HFLM]) -> None:
    fast, _ = pair
    written = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        written.append(texts(fast, CONTEXTS[:3] * 8, do_sample=True, temperature=1.5, top_k=0, top_p=1.0))
    assert written[0] == written[1] != written[2] and len(set(written[0])) > 12


def test_a_stop_that_is_a_special_token_ends_a_row_alone(tokenizer: Any) -> None:
    """Special tokens are not in the text, so the row must end by itself; as stock hf does with batch size 1."""
    model = make(len(tokenizer))
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids("<end>")] *= 2.5
    fast, stock = both(model, tokenizer, batch_size=1)
    written = texts(fast, TEXT.split(), 20, until=["<end>"])
    assert written == texts(stock, TEXT.split(), 20, until=["<end>"])
    assert len({len(tokenizer.encode(text)) for text in written}) > 3


def spelling(tokenizer: Any, prompt: str, text: str) -> Any:
    """A GPT-2 that says this text after a prompt of that length: its positions name the next token."""
    model = make(len(tokenizer), "gpt2", hidden_size=len(tokenizer), num_hidden_layers=1)
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
    fast, stock = both(spelling(tokenizer, prompt, text), tokenizer)
    assert fast._decodes
    for lm in (fast, stock):
        assert texts(lm, [prompt], 40, until=Renderer(tokenizer).stop) == [answer]


def test_a_long_generation_shows_how_far_it_is(pair: tuple[EludeLM, HFLM], monkeypatch: Any) -> None:
    shown: list[str] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, *args: Any, **kwargs: Any) -> bool:
            shown.append(str(self))
            return True

    monkeypatch.setattr(backend, "tqdm", Bar)
    pair[0].batch_tokens = 1000
    texts(pair[0], most=40)
    (within,) = (line for line in shown if "token 32 of at most 40, 3 texts under way" in line)
    assert "0/3" in within


def test_what_is_scored_is_kept_for_a_cache_batch_by_batch(tokenizer: Any, monkeypatch: Any) -> None:
    lm, kept, batches = EludeLM(pretrained=make(len(tokenizer)), tokenizer=tokenizer, batch_tokens=8), [], []
    lm.cache_hook.add_partial = lambda kind, asked, result: kept.append(asked)
    values(lm)
    assert sorted(kept) == sorted(QUESTIONS)
    kept.clear()

    def cut_off(*given: Any) -> Any:
        batches.append(len(kept))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return scorer.answer_logits(*given)

    monkeypatch.setattr("lm_eval_elude.model.backend.answer_logits", cut_off)
    with pytest.raises(KeyboardInterrupt):
        values(lm)
    assert 0 == batches[0] < batches[1] < batches[2] == len(kept) < len(QUESTIONS)


def test_out_of_memory_halves_the_batch_with_a_line(tokenizer: Any, lines: Any, monkeypatch: Any) -> None:
    fast, stock = both(make(len(tokenizer)), tokenizer, batch_tokens=400)
    forward = fast.model.forward
    written = texts(stock)

    def small(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[0] > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **kwargs)

    expected = values(stock)[0]
    monkeypatch.setattr(fast.model, "forward", small)
    assert values(fast)[0] == pytest.approx(expected, abs=1e-4)
    assert texts(fast) == written
    assert "out of memory" in lines()[-1] and f"now {fast.batch_tokens} tokens a batch" in lines()[-1]


def test_attention_that_counts_by_place_goes_the_stock_way() -> None:
    """Beyond the probe's twelve tokens a local layer of GPT-Neo leaves out what stands far off in a row."""
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "hidden_size": 32}
    model = transformers.AutoModelForCausalLM.from_config(transformers.GPTNeoConfig(vocab_size=50, **layers))
    assert "counts by place" in packing_fault(model)


def test_tokens_of_an_adapters_own_before_the_text_leave_no_place_for_single_tokens(tokenizer: Any, lines: Any) -> None:
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    fast = EludeLM(get_peft_model(make(len(tokenizer)), adapter), tokenizer=tokenizer)
    assert not hasattr(fast.rank, "serves") and "tokens of its own before a text" in lines()[-1]


def test_what_a_checkpoint_cuts_off_is_drawn_the_stock_way() -> None:
    settings = transformers.GenerationConfig
    assert not cuts_draws(settings()) and not cuts_draws(settings(typical_p=1.0, min_p=0.0))
    for cutting in ({"min_p": 0.1}, {"min_p": 1.0}, {"epsilon_cutoff": 3e-4}):
        assert cuts_draws(settings(**cutting))


def test_a_tree_that_is_too_much_is_built_smaller(tokenizer: Any, lines: Any, monkeypatch: Any) -> None:
    fast, stock = both(make(len(tokenizer)), tokenizer, batch_tokens=400)
    forward, expected = fast.model.forward, values(stock)[0]
    longest = max(len(tokenizer.encode(context + answer)) for context, answer in QUESTIONS)

    def small(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].numel() > longest:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **kwargs)

    monkeypatch.setattr(fast.model, "forward", small)
    assert values(fast)[0] == pytest.approx(expected, abs=1e-4)
    assert "out of memory with 1 rows" in " ".join(lines())


@pytest.mark.parametrize("given_tokens", ["many", "0", -3])
def test_bad_batch_tokens(given_tokens: Any, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"batch_tokens=.* must be a positive whole number"):
        EludeLM(make(len(tokenizer)), tokenizer=tokenizer, batch_tokens=given_tokens)


def test_token_log_probabilities_against_a_plain_forward(pair: tuple[EludeLM, HFLM], tokenizer: Any) -> None:
    fast, _ = pair
    scores = fast.token_logprobs(requests("token_logprobs", QUESTIONS[:8]), disable_tqdm=True)
    for (context, answer), score in zip(QUESTIONS[:8], scores, strict=True):
        ids, start = tokenizer.encode(context + answer), len(tokenizer.encode(context))
        with torch.no_grad():
            logs = fast.model(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
        assert score.log_probs == pytest.approx(logs[range(len(ids) - start), ids[start:]].tolist(), abs=1e-4)
        mean = (logs.exp() * logs).sum(-1)
        spread = ((logs.exp() * logs.square()).sum(-1) - mean.square()).sqrt()
        assert score.means == pytest.approx(mean.tolist(), abs=1e-4)
        assert score.stds == pytest.approx(spread.tolist(), abs=1e-3)
        assert score.greedy == (logs.argmax(-1) == torch.tensor(ids[start:])).tolist()


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: Any) -> str:
    """A checkpoint with a chat template whose prompts end in white space, as Llama-3.1's do."""
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}{{ m['role'] }}\n\n{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant\n\n{% endif %}"
    )
    return save_checkpoint(tmp_path_factory.mktemp("model"), make(len(tokenizer), max_position_embeddings=1024), chatty)


def test_torch_built_for_an_accelerator_that_is_not_there(folder: str, monkeypatch: Any) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert EludeLM(folder).device.type == "cpu"


def evaluated(folder: str, model: str, task: str, limit: int = 12, **metadata: Any) -> Any:
    metadata = {"pretrained": folder, "dataset": "mini", "target": "Cristiano Ronaldo", **metadata}
    return run([task], model, metadata=metadata, limit=limit, bootstrap_iters=0, gen_kwargs="max_gen_toks=4")


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
    models = {
        folder: make(len(tokenizer), max_position_embeddings=1024),
        str(tmp_path): make(len(other), num_hidden_layers=1),
    }
    save_checkpoint(tmp_path, models[str(tmp_path)], other)
    results = evaluated(folder, "elude", "elude_mia", limit=2, mia_reference=str(tmp_path))

    def mean_log_prob(name: str, prompt: str, answer: str) -> float:
        spelt = transformers.AutoTokenizer.from_pretrained(name)(prompt + answer, return_offsets_mapping=True)
        ids, first = spelt["input_ids"], [start >= len(prompt) for start, _ in spelt["offset_mapping"]].index(True)
        with torch.no_grad():
            logs = models[name](torch.tensor([ids])).logits[0].log_softmax(-1)
        return float(logs[range(first - 1, len(ids) - 1), ids[first:]].mean())

    renderer = Renderer(transformers.AutoTokenizer.from_pretrained(folder))
    for sample in results["samples"]["elude_mia"]:
        doc, gaps = sample["doc"], []
        for side in ("", "paraphrased_"):
            pair = renderer.prompt(doc[f"{side}question"]), renderer.answer(doc[f"{side}answer"])
            gaps.append(mean_log_prob(folder, *pair) - mean_log_prob(str(tmp_path), *pair))
        assert sample["mia_reference_auc"] == pytest.approx(gaps[0] - gaps[1], abs=1e-4)


def test_sixteen_bits_are_warned_of_where_they_cost_precision(folder: str) -> None:
    for model, arguments, warned in [
        (HFLM, {"dtype": "bfloat16"}, True),
        (HFLM, {"dtype": "bfloat16", "softmax_dtype": "float32"}, False),
        (HFLM, {"dtype": "float32"}, False),
        (EludeLM, {"dtype": "bfloat16"}, False),
    ]:
        line = harness.imprecise(model(folder, device="cpu", **arguments))  # type: ignore[arg-type]
        assert ("softmax_dtype=float32" in line) == warned == bool(line), (model, arguments)


@pytest.mark.parametrize("emulated", [True, False])
def test_a_processor_that_emulates_bfloat16_is_warned_of(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, emulated: bool
) -> None:
    monkeypatch.setattr("lm_eval_elude.model.backend.emulates_bfloat16", lambda device: emulated)
    for arguments, slow in (({"dtype": "bfloat16"}, True), ({"mixed_precision_dtype": "bfloat16"}, True), ({}, False)):
        caplog.clear()
        EludeLM(folder, device="cpu", **arguments)
        assert ("no bfloat16 arithmetic" in caplog.text) == (slow and emulated), arguments


def test_a_containers_limit_holds_and_what_its_files_take_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = limits.free_memory(torch.device("cpu"))
    monkeypatch.setattr(limits, "Path", lambda _: tmp_path)  # for /sys/fs/cgroup
    assert whole / 2 < limits.free_memory(torch.device("cpu")) < 2 * whole  # no container
    for name, text in {
        "memory.max": "1000",
        "memory.current": "900",
        "memory.stat": "anon 300\ninactive_file 600",
    }.items():
        (tmp_path / name).write_text(text)
    assert limits.free_memory(torch.device("cpu")) == 1000 - (900 - 600)
    (tmp_path / "memory.max").write_text("max")
    assert whole / 2 < limits.free_memory(torch.device("cpu")) < 2 * whole


RANKS = """
import atexit, json, sys
import torch.distributed
atexit.register(lambda: print("#", torch.distributed.is_initialized(), flush=True))  # the first in is the last to run
import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval_elude.model.backend import EludeLM

metadata = {"pretrained": sys.argv[1], "dataset": "mini", "target": "Cristiano Ronaldo"}
counts = []
score = EludeLM._loglikelihood_tokens
EludeLM._loglikelihood_tokens = lambda self, asked, *more, **given: counts.append(len(asked)) or score(
    self, asked, *more, **given
)
results = lm_eval.simple_evaluate(
    model="elude", model_args={"pretrained": sys.argv[1]}, tasks=["elude_forget"], device="cpu", limit=12,
    task_manager=TaskManager(include_path=sys.argv[2], include_defaults=False, metadata=metadata),
    gen_kwargs="max_gen_toks=4", bootstrap_iters=0,
)
print("@" + json.dumps([max(counts), results and results["results"]["elude_forget"]]), flush=True)
"""


@pytest.mark.slow
def test_each_rank_scores_its_share_on_cpu(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(script), folder, str(TASK_CONFIGS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# False") == 2  # both ranks have left their group before the interpreter ends
    reports = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    assert [count for count, _ in reports] == [6 * 8, 6 * 8]  # of 12 records: 7 answers and the prompt's white space
    (together,) = (result for _, result in reports if result)
    for name, value in scored(folder, "elude", "elude_forget").items():
        if isinstance(value, float):
            assert together[f"{name},none"] == pytest.approx(value, abs=1e-6)


@pytest.mark.slow
def test_the_benchmark_compares_every_suite_with_stock(tmp_path: Path, monkeypatch: Any) -> None:
    """On the bundled model; membership inference asks this backend in another way, and is compared all the same."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scoring = importlib.import_module("scoring")
    for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # set back after the benchmark has set them

    def start(*arguments: Any) -> Any:  # as threads: two interpreters would take longer than all the rest
        ours, theirs = multiprocessing.Pipe()

        def serve() -> None:
            with theirs:  # where it fails, the other end hears of it
                scoring.arm(theirs, *arguments)

        threading.Thread(target=serve, daemon=True).start()
        assert ours.poll(120)  # transformers loads one model at a time
        return ours

    monkeypatch.setattr(scoring, "start", start)
    written, model = tmp_path / "report.json", str(ROOT / "lm_eval_elude" / "mini" / "tiny")
    options = ["--model", model, "--limit=1", "--parts=2", "--new-tokens=3", "--json", written]
    assert called(scoring.main, *options).code == 0
    report = json.loads(written.read_text())
    assert set(report["compared"]) == {"plain", "attacks", "mia", "generation", "utility", "utility generation"}
    for suite, compared in report["compared"].items():
        assert compared["requests"] >= min(2, report["requests"][suite])
        assert compared["nats"] < 1e-3 and not compared["texts"]


def test_the_benchmarks_comparison_sees_a_difference(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    compare = importlib.import_module("scoring").compare
    stock = [("q", "a", -1.0), ("q", " ", -0.5), ("q", "b", -2.0), ("p", "", "text")]
    assert compare(stock, [("q", "a", -1.5), ("q", "b", -2.0), ("p", "", "other")]) == (3, 0.5, 1)
    assert compare(stock, [("r", "a", -1.0)]) == (0, 0.0, 0)
    assert compare([("q", " a", -1.5), ("q", " ", -0.5)], [("q ", "a", -1.25)]) == (1, 0.25, 0)
