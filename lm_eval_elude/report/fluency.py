"""The pass of the original model over a run's logged answers; what it finds is kept beside the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lm_eval_elude.data import bundled, jsonio
from lm_eval_elude.data.targets import TARGETS
from lm_eval_elude.metrics.fluency import Reading
from lm_eval_elude.model.backend import default_device
from lm_eval_elude.model.layers import generate
from lm_eval_elude.model.scorer import Scorer, load_model, score_all
from lm_eval_elude.tasks.runs import Run
from lm_eval_elude.tasks.tofu import EVALUATORS
from lm_eval_elude.text.chat import Renderer, check_place, load_tokenizer
from lm_eval_elude.text.invented import invented_names, renamed

READ = ("elude_forget", "tofu_forget")  # whose answers are read
OWN, NEW_TOKENS = 2, 64  # answers of the original model to a question, and tokens of each
_BATCH = 16


def measure(runs: Sequence[Run], original: str, revision: str | None = None, dtype: Any = "auto") -> None:
    """Write what the original model finds of each run's answers, where its file lacks a task or is another model's.

    ``original`` is a folder or Hub id, or the bundled model's name; UserError where it cannot be loaded.
    """
    path, reader = bundled.path_of(original), None
    name = Path(path).name if Path(path).is_dir() else original  # a folder's place is no one's business
    for run in runs:
        kept = jsonio.load(run.fluency_file) if run.fluency_file.is_file() else {}
        kept = kept if kept.get("original") == name else {"original": name}
        waiting = [task for task in READ if task in run.tasks and task not in kept]
        for task in waiting:
            reader = reader or Reader(path, revision, dtype)
            kept[task] = reader.read(run.docs[task], run.settings(task))
        if waiting:
            jsonio.write(run.fluency_file, kept, indent=0)


class Reader:
    """The original model, asked under invented names; its own answers are sampled once for all runs."""

    def __init__(self, path: str, revision: str | None, dtype: Any) -> None:
        check_place(path)
        self.tokenizer = load_tokenizer(path, revision=revision)
        self.model = load_model(path, revision, dtype, "--original-model").to(default_device()).eval()
        self.own: dict[str, list[float]] = {}  # by rendered question

    def read(self, docs: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[Reading]:
        """What it finds of the answer to each document."""
        asked = EVALUATORS[settings["evaluator"]] if "evaluator" in settings else None
        render = Renderer(self.tokenizer, asked.wording, asked.system) if asked else Renderer(self.tokenizer)
        pairs = [about_somebody_else(doc) for doc in docs]
        prompts = [render.prompt(question) for question, _ in pairs]
        self.sample(render, [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.own])
        found = self.means(render, [(p, answer) for p, (_, answer) in zip(prompts, pairs, strict=True)])
        return [Reading(value, self.own[prompt]) for value, prompt in zip(found, prompts, strict=True)]

    def sample(self, render: Renderer, prompts: Sequence[str]) -> None:
        """Let it answer each prompt :data:`OWN` times at temperature 1, always the same."""
        answers = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for first in range(0, len(prompts), _BATCH):
                part = prompts[first : first + _BATCH]
                rows = generate(self.model, [render.encode(p) for p in part for _ in range(OWN)], NEW_TOKENS, 1.0)
                answers += [self.ended(render, row) for row in rows]
        values = self.means(render, [(prompts[i // OWN], answer) for i, answer in enumerate(answers)])
        self.own |= {prompt: values[i * OWN : (i + 1) * OWN] for i, prompt in enumerate(prompts)}

    def ended(self, render: Renderer, row: list[int]) -> str:
        """The text of generated tokens up to what ends an answer."""
        text = self.tokenizer.decode(row)
        for stop in (*render.stop, self.tokenizer.eos_token, self.tokenizer.decode([0])):  # rows are filled up with 0
            text = text.split(stop)[0] if stop else text
        return text

    def means(self, render: Renderer, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Mean log-probabilities of answers to prompts, the end of the turn among their tokens."""
        encoded = [render.encode_pair(prompt, render.answer(answer)) for prompt, answer in pairs]
        values: list[float] = score_all(Scorer(self.model), encoded, _BATCH).means.tolist()
        return values


def about_somebody_else(doc: Mapping[str, Any]) -> tuple[str, str]:
    """A document's question and generated answer under an invented name; as they are where no target is named."""
    texts, entity = (doc["question"], doc["generated"]), doc.get("entity", "")
    if not entity:
        return texts
    aliases = next((target.aliases for target in TARGETS if target.name == entity), ())
    name = invented_names(" ".join(texts))[0]
    return renamed(texts[0], entity, name, aliases), renamed(texts[1], entity, name, aliases)
