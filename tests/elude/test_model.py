"""The fast backend gives stock ``hf``'s numbers and texts: over architectures, lengths, batches, padding and ranks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lm_eval_elude.model import EludeLM

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
    return fast, HFLM(model, tokenizer=tokenizer, **options)


CONTEXTS = ["when and where was she born ?", "he won", "the quick brown fox jumps over a lazy dog . when and where was he ?"]
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
