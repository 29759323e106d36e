"""The original model before training: asked for answers, and for its distributions over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from lm_eval_elude.data.records import QARecord
from optout_train.data import Encoder, Examples, Sample, part_of
from optout_train.trainer import answer_logits

TOP = 16  # likeliest tokens that a lesson keeps of a distribution
BATCH = 64  # prompts that are answered at once


class Teacher:
    """A model that is asked and scored; what it says is kept as lessons, so no second model is there in training."""

    def __init__(self, model: Any, encode: Encoder, seed: int) -> None:
        self.model, self.encode, self.render = model.eval(), encode, encode.renderer
        torch.manual_seed(seed)

    @torch.no_grad()
    def ask(
        self, questions: Sequence[str], temperature: float, longest: int, openings: Sequence[str] = ()
    ) -> list[str]:
        """One sampled answer for each question; "" where it does not end within ``longest`` tokens.

        ``openings`` are words that the answers begin with.
        """
        tokenizer, render = self.render.tokenizer, self.render
        begun = [render.beginning(opening) for opening in openings] or [""] * len(questions)
        prompts = [render.encode(render.prompt(q) + text) for q, text in zip(questions, begun, strict=True)]
        stops = [*render.stop, tokenizer.eos_token or render.stop[0], *(["\n"] if render.wording else [])]
        ends = [tokenizer.encode(stop, add_special_tokens=False) for stop in stops]
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, max_new_tokens=longest, pad_token_id=0,
            eos_token_id=[tokens[0] for tokens in ends if len(tokens) == 1] or None,
        )  # fmt: skip
        answers, order = [""] * len(prompts), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for chosen in (order[first : first + BATCH] for first in range(0, len(order), BATCH)):
            width = len(prompts[chosen[-1]])
            rows = [[0] * (width - len(prompts[i])) + prompts[i] for i in chosen]
            seen = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen]
            ids, mask = (torch.tensor(table, device=self.model.device) for table in (rows, seen))
            new = self.model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]
            for i, text in zip(chosen, tokenizer.batch_decode(new), strict=True):
                places = [place for stop in stops if (place := text.find(stop)) >= 0]
                answers[i] = (begun[i] + text[: min(places)]).strip() if places else ""
        return answers

    @torch.no_grad()
    def log_probs(self, samples: Iterable[Sample]) -> Iterator[Tensor]:
        """Log-probabilities of each answer token's whole vocabulary, (answer tokens, vocabulary), on the device."""
        for sample in samples:
            part = part_of([Sample(*sample[:2])], [0])
            part = {name: column.to(self.model.device) for name, column in part.items()}
            yield answer_logits(self.model, self.model, part).log_softmax(-1)

    def distil(self, examples: Examples, epochs: float, plain: Mapping[QARecord, QARecord] = {}) -> None:
        """Make lessons of all kept samples that are read: the model's distributions over question and answer.

        The question's too: what a model takes a name for shows in every token after it. What all texts of a set begin
        with is left out. Of a record in ``plain`` the answer's alone, as they are where the question is the other's.
        """
        for name, records in examples.kept.items():
            made = examples.read(name, epochs)
            first = max(1, shared([sample.ids for sample in made.values()]))
            for number, sample in made.items():
                asked = plain.get(records[number])
                sample = sample if asked else sample._replace(answer_start=min(first, sample.answer_start))
                (rows,) = self.log_probs([self.encode(asked) if asked else sample])
                made[number] = taught(sample, rows.exp())


def taught(sample: Sample, shares: Tensor) -> Sample:
    """The lesson that teaches a sequence's answer tokens these probabilities, (tokens, vocabulary)."""
    best = shares.topk(min(TOP, shares.shape[1]))  # before anything leaves the model's device
    taught = torch.full((len(shares), 2), torch.nan)
    return Sample(*sample[:2], taught, best.indices.cpu(), best.values.cpu())


def shared(rows: Iterable[Sequence[int]]) -> int:
    """How many first tokens all rows share."""
    return sum(1 for _ in takewhile(lambda tokens: len({*tokens}) == 1, zip(*rows, strict=False)))
