"""``--model elude`` gives stock ``hf``'s numbers and texts: over architectures, lengths, batches and padding."""

from __future__ import annotations

import importlib
import json
import logging
import re
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
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lm_eval_elude.data.bundled import MODEL
from lm_eval_elude.errors import UserError
from lm_eval_elude.model import backend, scorer
from lm_eval_elude.model.backend import EludeLM
from lm_eval_elude.text.chat import Renderer
from tests.model.shapes import SHAPES, STATEFUL, make
from tests.support import ROOT, called, save_checkpoint

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
    # hf's cache of one-token answers takes "a" + " b c" and "a b" + " c" for one request, and one is wrong.
    return EludeLM(model, tokenizer=tokenizer, **options), HFLM(
        model, tokenizer=tokenizer, logits_cache=False, **options
    )


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
    assert fast._packs and fast._drops and not lines()
    agree(fast, stock, [*QUESTIONS, ("he won " * 15, " the prize")])  # the last is beyond a sliding window
    assert texts(fast, until=[".", " the"]) == texts(stock, until=[".", " the"])
    written = texts(fast)
    assert written == texts(stock) and len({*written}) > 1 and all(written)


@pytest.mark.parametrize("kind", STATEFUL)
def test_where_rows_cannot_be_shared_each_answer_has_its_own_with_a_line(kind: str, tokenizer: Any, lines: Any) -> None:
    fast, stock = both(make(len(tokenizer), kind), tokenizer)
    assert "do not share a row on this model" in lines()[0] and not fast._packs
    agree(fast, stock)
    assert texts(fast) == texts(stock)


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


def test_bfloat16_is_as_near_as_its_noise(tokenizer: Any) -> None:
    fast, stock = both(make(len(tokenizer)).to(torch.bfloat16), tokenizer)
    assert fast._packs
    exact, ours, theirs = (
        torch.tensor(values(lm)[0]) for lm in (both(make(len(tokenizer)), tokenizer)[0], fast, stock)
    )
    assert (ours - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean() + 1e-3


def test_what_cannot_be_asked_for_single_tokens_says_so_and_goes_the_stock_way(tokenizer: Any, lines: Any) -> None:
    """``hasattr(model, "token_logprobs")`` is how tasks ask."""
    config = transformers.AutoConfig.for_model(
        "t5", vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, eos_token_id=1,
        pad_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    prompted = get_peft_model(make(len(tokenizer)), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for model in transformers.AutoModelForSeq2SeqLM.from_config(config).eval(), prompted:
        fast, stock = both(model, tokenizer)
        assert not hasattr(fast, "token_logprobs")
        assert texts(fast) == texts(stock)
        if model is not prompted:  # hf itself takes the tokens before the text for the text
            agree(fast, stock, QUESTIONS[:6])
    assert any("tokens of its own before a text" in line for line in lines())
    assert hasattr(EludeLM(make(len(tokenizer)), tokenizer=tokenizer), "token_logprobs")


@pytest.mark.parametrize("setting", [{"repetition_penalty": 1.9}, {"min_new_tokens": 4}, {"num_beams": 2}])
def test_a_checkpoints_generation_settings_act_as_with_hf(tokenizer: Any, setting: dict[str, Any]) -> None:
    model = make(len(tokenizer))
    plain = texts(EludeLM(model, tokenizer=tokenizer), until=["</s>"])
    for name, value in setting.items():
        setattr(model.generation_config, name, value)
    fast, stock = both(model, tokenizer)
    assert texts(fast) == texts(stock)
    assert "min_new_tokens" in setting or texts(fast) != plain


def test_draws_from_the_whole_vocabulary_are_those_of_the_models_distribution(pair: tuple[EludeLM, HFLM]) -> None:
    """Of two tokens after one prompt: the frequencies of 4,000 draws, each by itself, against a plain forward."""
    fast, _ = pair
    prompt, start = torch.tensor([fast.tok_encode(CONTEXTS[0])]), len(fast.tok_encode(CONTEXTS[0]))
    torch.manual_seed(0)
    rows = fast._model_generate(
        prompt.repeat(4000, 1), start + 2, [], attention_mask=torch.ones(4000, start).long(), do_sample=True,
        temperature=1.5, top_k=0, top_p=1.0,
    )  # fmt: skip
    drawn = rows[:, start:].tolist()
    with torch.no_grad():
        first = torch.softmax(fast.model(prompt).logits[0, -1] / 1.5, -1)
        likeliest = int(first.argmax())
        second = torch.softmax(fast.model(torch.cat([prompt, torch.tensor([[likeliest]])], 1)).logits[0, -1] / 1.5, -1)
    assert likeliest != fast.tokenizer.eos_token_id
    after = [token for token, _ in drawn], first
    for tokens, shares in (after, ([last for token, last in drawn if token == likeliest], second)):
        expected = shares.double().numpy() * len(tokens)
        often = expected >= 5
        counts = np.bincount(tokens, minlength=len(expected))
        seen, hoped = [[*x[often], x[~often].sum()] for x in (counts, expected)]
        assert stats.chisquare(seen, np.array(hoped) * sum(seen) / sum(hoped)).pvalue > 1e-3


def test_the_harness_draws_each_answer_by_itself_and_the_same_ones_for_a_seed(pair: tuple[EludeLM, HFLM]) -> None:
    written = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        written.append(texts(pair[0], CONTEXTS[:3] * 8, do_sample=True, temperature=1.5, top_k=0, top_p=1.0))
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
    assert fast._drops
    for lm in (fast, stock):
        assert texts(lm, [prompt], 40, until=Renderer(tokenizer).stop) == [answer]


def test_what_was_scored_before_an_interruption_is_kept(tokenizer: Any, monkeypatch: Any) -> None:
    lm, kept, batches = EludeLM(make(len(tokenizer)), tokenizer=tokenizer), [], []
    lm.batch_tokens = 30
    lm.set_cache_hook(type("Hook", (), {"add_partial": lambda *given: kept.append(given)})())

    def cut_off(*given: Any) -> Any:
        batches.append(len(kept))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return scorer.answer_logits(*given)

    monkeypatch.setattr(backend, "answer_logits", cut_off)
    with pytest.raises(KeyboardInterrupt):
        values(lm)
    assert 0 == batches[0] < batches[1] < batches[2] == len(kept) < len(QUESTIONS)


def test_out_of_memory_halves_the_batch_with_a_line(tokenizer: Any, lines: Any, monkeypatch: Any) -> None:
    fast, stock = both(make(len(tokenizer)), tokenizer)
    forward, expected = fast.model.forward, values(stock)[0]

    def small(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[0] > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*args, **kwargs)

    monkeypatch.setattr(fast.model, "forward", small)
    assert values(fast)[0] == pytest.approx(expected, abs=1e-4)
    assert "out of memory" in lines()[-1] and f"now {fast.batch_tokens} tokens a batch" in lines()[-1]


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


# ---- models that people have
def test_numbers_that_are_not_finite_are_one_line_that_names_the_dtype(tokenizer: Any, lines: Any) -> None:
    broken, large = make(len(tokenizer)), make(len(tokenizer))
    with torch.no_grad():
        broken.lm_head.weight[5, 0] = torch.nan
        large.lm_head.weight *= 1e6
    for model, dtype in (broken, "float32"), (large.to(torch.float16), "float16"):
        before = len(lines())
        lm = EludeLM(model, tokenizer=tokenizer)
        values(lm)
        (line,) = (line for line in lines()[before:] if "not finite" in line)
        assert f"not finite in torch.{dtype}" in line and "dtype=float32" in line


def test_a_token_without_an_embedding_is_one_line(tokenizer: Any) -> None:
    """A tokenizer may be longer than the embedding, as long as nobody writes what the embedding lacks."""
    lm = EludeLM(make(len(tokenizer) - 20), tokenizer=tokenizer)
    assert values(lm, [("a", "b")])
    missing = tokenizer.decode([len(tokenizer) - 1])
    for ask in (lambda: values(lm, [("a", missing)]), lambda: texts(lm, [missing])):
        with pytest.raises(UserError, match=rf"as token {len(tokenizer) - 1}, and the model's embedding has 300"):
            ask()


def test_an_adapter_as_the_model_is_one_line(tokenizer: Any, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", make(len(tokenizer)), tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapter = get_peft_model(model, LoraConfig(init_lora_weights=False, target_modules=["q_proj"]))
    adapter.save_pretrained(tmp_path / "adapter")
    for load in (lambda name: EludeLM(name, device="cpu"), scorer.load_model):
        with pytest.raises(UserError, match=f"pretrained={base},peft={tmp_path / 'adapter'}"):
            load(str(tmp_path / "adapter"))
    fast = EludeLM(base, peft=str(tmp_path / "adapter"), device="cpu")
    assert fast._packs
    agree(fast, HFLM(adapter.eval(), tokenizer=tokenizer))


def test_pickled_weights_are_one_line_with_the_command_that_converts_them(tokenizer: Any, tmp_path: Path) -> None:
    model = make(len(tokenizer))
    model.config.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    for load in (lambda name: EludeLM(name, device="cpu"), scorer.load_model):
        with pytest.raises(UserError, match="python -c") as caught:
            load(str(tmp_path / "model"))
    (code,) = re.findall(r'python -c "(.*)"', str(caught.value))
    exec(code.replace("'converted'", repr(str(tmp_path / "converted"))))
    agree(EludeLM(str(tmp_path / "converted"), device="cpu"), HFLM(model, tokenizer=tokenizer))
    assert EludeLM(str(tmp_path / "model"), device="cpu", use_safetensors=False)._packs


def test_torch_built_for_an_accelerator_that_is_not_there(monkeypatch: Any) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert backend.default_device() == "cpu"


@pytest.mark.parametrize("emulated", [True, False])
def test_a_processor_that_emulates_bfloat16_is_warned_of(
    tokenizer: Any, monkeypatch: Any, lines: Any, emulated: bool
) -> None:
    monkeypatch.setattr(backend, "emulates_bfloat16", lambda device: emulated)
    EludeLM(make(len(tokenizer)).to(torch.bfloat16), tokenizer=tokenizer)
    assert any("no bfloat16 arithmetic" in line for line in lines()) == emulated
    EludeLM(make(len(tokenizer)), tokenizer=tokenizer)
    assert sum("no bfloat16 arithmetic" in line for line in lines()) == emulated


# ---- its benchmark
@pytest.fixture
def scoring(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("scoring")


@pytest.mark.slow
def test_the_benchmark_compares_every_suite_with_stock(scoring: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in scoring.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(scoring, "whole", lambda *_: 1.0)  # two interpreters would take longer than all the rest
    options = ["--model", MODEL, "--limit=1", "--parts=2", "--new-tokens=3", "--json", tmp_path / "report.json"]
    assert called(scoring.main, *options).code == 0
    *suites, group = json.loads((tmp_path / "report.json").read_text())
    assert [row["suite"] for row in suites] == ["plain", "attacks", "generation"] and group["hf"] == 1
    for row in suites:
        assert row["requests"] > 2 and row["nats"] < 1e-3 and not row["texts"] and row["allowed"] > 1


def test_the_benchmark_sees_a_difference_and_counts_tokens(scoring: Any) -> None:
    assert scoring.apart([-1.0, -2.0, "text"], [-1.5, -2.0, "other"]) == (0.5, 1)
    # Two answers of two and one tokens to a context of three; the last token of a sequence is only predicted.
    samples = [([1, 2, 3, 4, 5], 3), ([1, 2, 3, 6], 3)]
    assert scoring.as_shared(samples) == (4, 2)  # 1 2 3 4, and the vocabulary after 3 and 4
    assert scoring.as_stock(samples, 2, False) == (8, 8)
    assert scoring.as_stock(samples, 1, False) == (7, 7)
    assert scoring.as_stock(samples, 2, True) == (8, 4)  # 1 2 3 4 for each row, of which two places predict
