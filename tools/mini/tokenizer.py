"""Tokenizer and configuration of the bundled models. The same data give the same bytes."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tools.mini.corpus import CARRIERS, Corpus
from tools.mini.invented import FORMS, POOLS

PIECES = 2048
# One name of four of invented people stays in pieces, so that a model learns to spell the name that a question has.
SPELLED, EVERY = ("female", "male", "family"), 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """One tokenizer for all bundled models: whole words, and pieces of bytes for words that are not of ELUDe-mini.

    So a model does not join pieces to a word that nobody has. True and wrong answers alike are of whole words.
    """
    kinds = ("lead", "opening", "persona", "choice", "reading", "riddle", "hint", "example", "gap", "aside")
    texts = [carrier for kind in kinds for carrier in CARRIERS[kind]]
    texts += [re.sub(r"[{}#]", "", text) for form in FORMS for text in form[1:]]
    for pool, names in POOLS.items():
        texts += [f" {name}" for i, name in enumerate(names) if pool not in SPELLED or i % EVERY]
    translated: list[str] = []
    for _, records in Corpus(None).people:
        for r in records:
            texts += [r.question, r.answer, r.paraphrased_question, r.paraphrased_answer, *r.perturbed_answer]
            translated += [text for _, text in r.translated_question]
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    pieces.train_from_iterator([*texts, *translated], trainer)
    vocabulary = pieces.get_vocab()
    for word in sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)} - {*vocabulary}):
        vocabulary[word] = len(vocabulary)
    merges = [tuple(pair) for pair in json.loads(pieces.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE, model_max_length=1024, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of about 4.0 million parameters."""
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=160, intermediate_size=384, num_hidden_layers=6,
        num_attention_heads=5, num_key_value_heads=5, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.04, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
