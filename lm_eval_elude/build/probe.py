"""Which facts a model knows, before they are unlearned: where it knows few, forget quality says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.text.words import STOP, words


class Fact(NamedTuple):
    """What a model makes of one record."""

    question: str
    answer: str  # of the record
    said: str  # the model's own (greedy) answer
    likeliest: bool  # the paraphrased answer is likelier, a token, than every wrong one: by luck in 1 of 6
    stated: bool  # its own answer has at least half of the words that tell the right answer from the wrong ones

    @property
    def known(self) -> bool:
        return self.likeliest and self.stated


def probe(model: str, records: Sequence[QARecord], batch_size: int = 16) -> list[Fact]:
    """A :class:`Fact` for each record, which all have a paraphrase and wrong answers.

    UserError where the model cannot be loaded.
    """
    import torch

    from lm_eval_elude.model.scorer import Scorer, load_model, score_all
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    renderer = Renderer(load_tokenizer(model))
    language_model = load_model(model).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    answers = [(record.paraphrased_answer, *record.perturbed_answer) for record in records]
    pairs = [(record.question, text) for record, texts in zip(records, answers, strict=True) for text in texts]
    samples = [renderer.encode_turn(*pair) for pair in pairs]
    sums, counts = score_all(Scorer(language_model), samples, batch_size)
    means = iter((sums / counts).tolist())
    facts = []
    for record, texts in zip(records, answers, strict=True):
        right, *wrong = [next(means) for _ in texts]
        prompt = torch.tensor([renderer.encode(renderer.prompt(record.question))], device=language_model.device)
        with torch.no_grad():
            output = language_model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False,
                pad_token_id=renderer.tokenizer.pad_token_id or renderer.tokenizer.eos_token_id,
            )  # fmt: skip
        said = renderer.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        said = " ".join(said.split("\nQuestion:")[0].split())
        shared = frozenset.intersection(*map(words, record.perturbed_answer))
        telling = words(record.paraphrased_answer) - shared - STOP - words(record.question)
        stated = bool(telling) and 2 * len(telling & words(said)) >= len(telling)
        facts.append(Fact(record.question, record.answer, said, right > max(wrong), stated))
    return facts
