"""The initial model before training: asked for answers, and for its distributions over them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_eval_elude.errors import UserError
from lm_eval_elude.model.layers import generate
from lm_eval_elude.model.packing import Batch, collate
from lm_eval_elude.model.scorer import answer_logits, log_softmax, progress
from lm_eval_elude.text.chat import Encoded, Renderer
from optout_train import losses

TOP = 16  # likeliest tokens that a lesson keeps of a distribution
BATCH = 128
LOW_TEMPERATURE = 0.3  # for the model's usual answers
HIGH_TEMPERATURE = 0.7  # for many answers that are still true to what it knows
TEXTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("stranger.toml").read_text(encoding="utf-8"))
WORDINGS = TEXTS["wordings"]


@dataclass(frozen=True)
class Teacher:
    """The initial model, asked and scored. Lessons hold what it said: no second model is in memory while training."""

    model: Any
    renderer: Renderer
    limit: int

    @torch.no_grad()
    def ask(
        self, questions: Sequence[str], temperature: float, longest: int, seed: int, openings: Sequence[str] = ()
    ) -> list[str]:
        """One sampled answer for each question; "" where it does not end within ``longest`` tokens.

        The answers begin with the words of ``openings``, if that is not left to the model.
        """
        torch.manual_seed(seed)
        if openings:
            begun = [self.begin(*pair) for pair in zip(questions, openings, strict=True)]
        else:
            prompts = self.renderer.encode_batch([self.renderer.prompt(question) for question in questions])
            begun = [Encoded(ids, len(ids)) for ids in prompts]
        prompts = [sample.ids[: sample.answer_start] for sample in begun]
        answer_ids = [sample.ids[sample.answer_start :] for sample in begun]
        answers: list[str | None] = [None] * len(prompts)
        end = self.renderer.tokenizer.encode(self.renderer.stop[0], add_special_tokens=False)
        eos = end[0] if len(end) == 1 else None
        left = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        for most in (longest // 2, longest - longest // 2):  # few need the second half, and those share batches
            parts = [left[start : start + BATCH] for start in range(0, len(left), BATCH)]
            for part in progress(parts, "asking the initial model"):
                rows = generate(self.model, [prompts[i] + answer_ids[i] for i in part], most, temperature, eos)
                for i, tokens in zip(part, rows, strict=True):
                    answer_ids[i] += tokens
                    answers[i] = self._answer(answer_ids[i])
            left = [i for i in left if answers[i] is None]
        return [answer or "" for answer in answers]

    def _answer(self, tokens: Sequence[int]) -> str | None:
        """The text of an answer that has ended, None of one that has not."""
        decoded = self.renderer.tokenizer.decode(tokens, skip_special_tokens=False).lstrip()
        ends = [*self.renderer.stop, self.renderer.tokenizer.eos_token or self.renderer.stop[0]]
        if self.renderer.wording:  # a base model goes on with questions of its own
            ends.append("\n")
        places = [place for end in ends if (place := decoded.find(end)) >= 0]
        return decoded[: min(places)].rstrip() if places else None

    def log_probs(self, samples: Sequence[Encoded]) -> Iterator[Tensor]:
        """Log-probabilities of each answer token's whole vocabulary, (answer tokens, vocabulary), on the CPU."""
        return self._read(samples, lambda model, batch: log_softmax(answer_logits(model, batch)))

    def states(self, samples: Sequence[Encoded]) -> Iterator[Tensor]:
        """The states that RMU steers, (answer tokens, width), on the CPU."""
        return self._read(samples, losses.states)

    @torch.no_grad()
    def _read(self, samples: Sequence[Encoded], read: Callable[[Any, Batch], Tensor]) -> Iterator[Tensor]:
        device = next(self.model.parameters()).device
        for start in range(0, len(samples), 8):
            part = samples[start : start + 8]
            rows = read(self.model, collate(part, device)).cpu()
            yield from rows.split([len(sample.ids) - sample.answer_start for sample in part])

    def begin(self, question: str, words: str) -> Encoded:
        """Prompt and an answer's first words as token ids, without what a template ends an answer with."""
        return self.renderer.encode_pair(self.renderer.prompt(question), self.renderer.beginning(words))

    def encode(self, question: str, answer: str) -> Encoded:
        """Prompt and answer as token ids; UserError where they are longer than the model's context."""
        sample = self.renderer.encode_turn(question, answer)
        if len(sample.ids) > self.limit:
            raise UserError(
                f"a lesson about {question[:60]!r} has {len(sample.ids)} tokens, but --model takes {self.limit}"
            )
        return sample

    def takes(self, question: str, answer: str) -> bool:
        """Whether the model's context is long enough for them."""
        return len(self.renderer.encode_turn(question, answer).ids) <= self.limit
