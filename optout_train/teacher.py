"""The initial model before training: asked for answers, and for its distributions over them.

Nothing of it is kept afterwards but what was written down as lessons: no second model is in memory while training.
"""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_eval_elude.core.chat import Encoded, Renderer
from lm_eval_elude.core.dataset import resolve_targets
from lm_eval_elude.core.records import DataError, QARecord
from optout_train.config import TrainConfig
from optout_train.data import Lesson, StepIndices, TrainingData

TOP = 16  # likeliest tokens that a lesson keeps of a distribution
BATCH = 128
CALM = 0.3  # temperature of answers that are to be the model's usual ones
LOOSE = 0.7  # of answers that are to be many, and true to what it knows
ASKED = 2  # questions of neighbours for each of the retain set
TEXTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("stranger.toml").read_text(encoding="utf-8"))
ASKING = TEXTS["asking"]


@dataclass(frozen=True)
class Teacher:
    """The initial model, asked and scored; nothing of it is kept after the lessons are made."""

    model: Any
    renderer: Renderer
    limit: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @torch.no_grad()
    def ask(
        self, questions: Sequence[str], temperature: float, longest: int, seed: int, openings: Sequence[str] = ()
    ) -> list[str]:
        """One sampled answer for each question; "" where it does not end within ``longest`` tokens.

        Args:
            questions: each is asked once.
            temperature: of the sampling.
            longest: most tokens that are sampled.
            seed: of the sampling.
            openings: the words that each answer begins with, if they are not left to the model.
        """
        torch.manual_seed(seed)
        if openings:
            begun = [self.begin(*pair) for pair in zip(questions, openings, strict=True)]
        else:
            prompts = self.renderer.encode_batch([self.renderer.prompt(question) for question in questions])
            begun = [Encoded(ids, len(ids)) for ids in prompts]
        prompts, said = [one.ids[: one.answer_start] for one in begun], [one.ids[one.answer_start :] for one in begun]
        answers: list[str | None] = [None] * len(prompts)
        left = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        for most in (longest // 2, longest - longest // 2):  # few need the second half, and those share batches
            for part in (left[start : start + BATCH] for start in range(0, len(left), BATCH)):
                rows = self._sample([prompts[i] + said[i] for i in part], temperature, most)
                for i, tokens in zip(part, rows, strict=True):
                    said[i] += tokens
                    answers[i] = self._answer(said[i])
            left = [i for i in left if answers[i] is None]
        return [answer or "" for answer in answers]

    def _sample(self, prompts: Sequence[list[int]], temperature: float, most: int) -> list[list[int]]:
        tokenizer, width = self.renderer.tokenizer, max(map(len, prompts))
        ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        ends = tokenizer.encode(self.renderer.stop[0], add_special_tokens=False)
        return self.model.generate(  # type: ignore[no-any-return]
            input_ids=ids.to(self.device), attention_mask=mask.to(self.device), do_sample=True, top_k=0, top_p=1.0,
            temperature=temperature, max_new_tokens=most, pad_token_id=0,
            **({"eos_token_id": ends[0]} if len(ends) == 1 else {}),
        )[:, width:].tolist()  # fmt: skip

    def _answer(self, tokens: Sequence[int]) -> str | None:
        """The text of an answer that has ended, None of one that has not."""
        said = self.renderer.tokenizer.decode(tokens, skip_special_tokens=False)
        text, end, _ = said.partition(self.renderer.stop[0])
        if not self.renderer.has_template:  # a base model goes on with questions of its own
            text, end, _ = text.strip().partition("\n")
        return text.strip() if end else None

    @torch.no_grad()
    def log_probs(self, samples: Sequence[Encoded]) -> Iterator[Tensor]:
        """Log-probabilities of each answer token's whole vocabulary, (answer tokens, vocabulary), on the CPU."""
        for start in range(0, len(samples), 8):
            part = samples[start : start + 8]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.ids) for sample in part], batch_first=True)
            logits = self.model(input_ids=ids.to(self.device), use_cache=False).logits
            for row, sample in zip(logits, part, strict=True):
                yield row[sample.answer_start - 1 : len(sample.ids) - 1].float().log_softmax(-1).cpu()

    def begin(self, question: str, words: str) -> Encoded:
        """Prompt and an answer's first words as token ids, without what a template ends an answer with."""
        text = self.renderer.answer(words)
        text = text[: text.index(words.strip()) + len(words.strip())]
        return self.renderer.encode_pair(self.renderer.prompt(question), text)

    def encode(self, question: str, answer: str) -> Encoded:
        """Prompt and answer as token ids.

        Raises:
            DataError: they are longer than the model's context.
        """
        sample = self.renderer.encode_pair(self.renderer.prompt(question), self.renderer.answer(answer))
        if len(sample.ids) > self.limit:
            raise DataError(
                f"a lesson about {question[:60]!r} has {len(sample.ids)} tokens, but --model takes {self.limit}"
            )
        return sample


def openings(rng: random.Random, answers: Sequence[str]) -> str:
    """The first word or two of one of these answers: what begins otherwise says what is known in other words."""
    return " ".join(rng.choice(answers).split()[: rng.choice((1, 2))])


def names_neighbour(record: QARecord) -> bool:
    """Whether a record of the retain set names the neighbour whom it asks about."""
    return bool(record.source) and record.source in record.question


def by_neighbour(records: Iterable[QARecord]) -> dict[str, list[str]]:
    """The answers about each neighbour that a question names."""
    people: dict[str, list[str]] = {}
    for record in filter(names_neighbour, records):
        people.setdefault(record.source, []).append(record.answer)
    return people


def exchange(config: TrainConfig, data: TrainingData, teacher: Teacher) -> tuple[QARecord, ...]:
    """:data:`ASKED` times as many records as the retain set has: neighbours' questions asked of other neighbours.

    The model answers them, beginning as other answers about that neighbour do: what it knows of neighbours goes beyond
    the retain set's questions. Answers that name a target are left out.
    """
    rows = [record for record in data.retain.records if names_neighbour(record)]
    people = by_neighbour(sorted(rows, key=lambda record: record.source))
    if len(people) < 2:
        return ()
    rng = random.Random(f"{config.seed}-exchange")
    swapped = [
        (record, rng.choice([name for name in people if name != record.source]))
        for record in rng.choices(rows, k=ASKED * len(rows))
    ]
    questions = [rng.choice(ASKING).format(q=record.question.replace(record.source, name)) for record, name in swapped]
    first = [openings(rng, people[name]) for _, name in swapped]
    longest = 3 * max(len(teacher.renderer.tokenizer.encode(record.answer)) for record in rows) // 2
    names = {n for one in resolve_targets(config.dataset, config.target) for n in (*one.name.split(), *one.aliases)}
    answers = teacher.ask(questions, LOOSE, longest, config.seed + 3, first)
    return tuple(
        replace(record, question=question, answer=answer, source=name)
        for (record, name), question, answer in zip(swapped, questions, answers, strict=True)
        if answer and not any(word in answer for word in names if len(word) > 2)
    )


def distil(teacher: Teacher, data: TrainingData, plan: Iterable[StepIndices]) -> dict[str, dict[int, Lesson]]:
    """For the retain and world records that a plan reads, the initial model's distributions over question and answer.

    The question's too: what a model takes a name for shows in every token after it, and how the answers to a few
    questions are distributed says less of what it knows of a neighbour. What all texts of a set begin with is left out.
    """
    kept: dict[str, dict[int, Lesson]] = {}
    for name in ("retain", "world"):
        kept[name] = {}
        records = sorted({record for step in plan for record in getattr(step, name)})
        encoded = [getattr(data, name).encode(record) for record in records]
        alike = itertools.takewhile(lambda tokens: len({*tokens}) == 1, zip(*(s.ids for s in encoded), strict=False))
        first = max(1, sum(1 for _ in alike))
        samples = [sample._replace(answer_start=min(first, sample.answer_start)) for sample in encoded]
        for record, (ids, start), rows in zip(records, samples, teacher.log_probs(samples), strict=True):
            best = rows.exp().topk(TOP)
            taught = torch.full((len(rows), 2), torch.nan)
            kept[name][record] = Lesson(ids, start, taught, best.indices, best.values)
    return kept
