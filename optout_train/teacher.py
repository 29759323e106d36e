"""The initial model before training: asked for answers, and for its distributions over them.

Nothing of it is kept afterwards but what was written down as lessons: no second model is in memory while training.
"""

from __future__ import annotations

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
    def ask(self, questions: Sequence[str], temperature: float, longest: int, seed: int) -> list[str]:
        """One sampled answer for each question; "" where it does not end within ``longest`` tokens."""
        torch.manual_seed(seed)
        prompts = self.renderer.encode_batch([self.renderer.prompt(question) for question in questions])
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        answers = [""] * len(prompts)
        tokenizer, stop = self.renderer.tokenizer, self.renderer.stop[0]
        ends = tokenizer.encode(stop, add_special_tokens=False)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            width = len(prompts[part[-1]])
            ids = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(part):
                ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]) :] = 1
            said = self.model.generate(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), do_sample=True, top_k=0, top_p=1.0,
                temperature=temperature, max_new_tokens=longest, pad_token_id=0,
                **({"eos_token_id": ends[0]} if len(ends) == 1 else {}),
            )  # fmt: skip
            for i, tokens in zip(part, said[:, width:], strict=True):
                text, end, _ = tokenizer.decode(tokens, skip_special_tokens=False).partition(stop)
                line, newline, _ = text.strip().partition("\n")  # a base model goes on with questions of its own
                answers[i] = text.strip() if end and self.renderer.has_template else line.strip() if newline else ""
        return answers

    @torch.no_grad()
    def log_probs(self, samples: Sequence[Encoded]) -> Iterator[Tensor]:
        """Log-probabilities of each answer token's whole vocabulary, (answer tokens, vocabulary), on the CPU."""
        for start in range(0, len(samples), 8):
            part = samples[start : start + 8]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.ids) for sample in part], batch_first=True)
            logits = self.model(input_ids=ids.to(self.device), use_cache=False).logits
            for row, sample in zip(logits, part, strict=True):
                yield row[sample.answer_start - 1 : len(sample.ids) - 1].float().log_softmax(-1).cpu()

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


def exchange(config: TrainConfig, data: TrainingData, teacher: Teacher) -> tuple[QARecord, ...]:
    """As many records as the retain set has: neighbours' questions asked of other neighbours, answered by the model.

    What it knows of them goes beyond the retain set's questions. Answers that name a target are left out.
    """
    rows = [record for record in data.retain.records if record.source and record.source in record.question]
    people = sorted({record.source for record in rows})
    if len(people) < 2:
        return ()
    rng = random.Random(f"{config.seed}-exchange")
    swapped = [
        (record, rng.choice([name for name in people if name != record.source]))
        for record in rng.choices(rows, k=len(rows))
    ]
    questions = [rng.choice(ASKING).format(q=record.question.replace(record.source, name)) for record, name in swapped]
    longest = 3 * max(len(teacher.renderer.tokenizer.encode(record.answer)) for record in rows) // 2
    names = {n for one in resolve_targets(config.dataset, config.target) for n in (*one.name.split(), *one.aliases)}
    answers = teacher.ask(questions, CALM, longest, config.seed + 3)
    return tuple(
        replace(record, question=question, answer=answer, source=name)
        for (record, name), question, answer in zip(swapped, questions, answers, strict=True)
        if answer and not any(word in answer for word in names if len(word) > 2)
    )


def distil(teacher: Teacher, data: TrainingData, plan: Iterable[StepIndices]) -> dict[str, dict[int, Lesson]]:
    """For the retain and world records that a plan reads, the initial model's distributions over their answers."""
    kept: dict[str, dict[int, Lesson]] = {}
    for name in ("retain", "world"):
        kept[name] = {}
        records = sorted({record for step in plan for record in getattr(step, name)})
        samples = [getattr(data, name).encode(record) for record in records]
        for record, (ids, start), rows in zip(records, samples, teacher.log_probs(samples), strict=True):
            best = rows.exp().topk(TOP)
            taught = torch.full((len(rows),), torch.nan)
            kept[name][record] = Lesson(ids, start, taught, best.indices, best.values)
    return kept
