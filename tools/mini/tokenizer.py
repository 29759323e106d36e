"""Tokenizer and configuration of the bundled models. The same data give the same bytes."""

from __future__ import annotations

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tools.mini.corpus import CARRIERS, Corpus
from tools.mini.invented import FORMS, POOLS

VOCABULARY = 7168
# Names of invented people stay in pieces, so that a model learns to spell the name that a question has.
SPELLED = ("female", "male", "family")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE on all texts of ELUDe-mini, one tokenizer for both models."""
    kinds = ("lead", "opening", "persona", "choice", "riddle", "hint", "example", "gap", "aside")
    texts = [carrier for kind in kinds for carrier in CARRIERS[kind]]
    for _, records in Corpus(None).people:
        for r in records:
            texts += [r.question, r.answer, r.paraphrased_question, r.paraphrased_answer, *r.perturbed_answer]
            texts += [text for _, text in r.translated_question]
    texts += [f" {word}" for pool, words in POOLS.items() if pool not in SPELLED for word in words for _ in range(40)]
    texts += [re.sub(r"[{}#]", "", text) for form in FORMS for text in form[1:] for _ in range(3)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE, model_max_length=1024, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of about 3.4 million parameters."""
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=5,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.04, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
