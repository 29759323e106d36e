"""Which facts a model knows, before they are unlearned: where it knows few, forget quality says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.text.words import STOP, words


class Fact(NamedTuple):
    """What a model makes of one record."""

    question: str
    said: str  # the model's own (greedy) answer
    likeliest: bool  # the paraphrased answer is likelier, a token, than every wrong one: by luck in 1 of 6
    known: (
        bool  # likeliest, and the model said half or more of the words that tell the right answer from the wrong ones
    )


def probe(model: str, records: Sequence[QARecord], batch_size: int = 16) -> list[Fact]:
    """A :class:`Fact` for each record, which all have a paraphrase and wrong answers."""
    import torch

    from lm_eval_elude.model.scorer import Scorer, load_model, score_all
    from lm_eval_elude.text.chat import Renderer, load_tokenizer

    renderer = Renderer(load_tokenizer(model))
    language_model = load_model(model).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    answers = [
        (record.question, text) for record in records for text in (record.paraphrased_answer, *record.perturbed_answer)
    ]
    sums, counts = score_all(Scorer(language_model), [renderer.encode_turn(*pair) for pair in answers], batch_size)
    means = iter((sums / counts).tolist())
    facts = []
    for record in records:
        right, *wrong = [next(means) for _ in (record.paraphrased_answer, *record.perturbed_answer)]
        prompt = torch.tensor([renderer.encode(renderer.prompt(record.question))], device=language_model.device)
        output = language_model.generate(prompt, max_new_tokens=48, do_sample=False)[0, prompt.shape[1] :]
        said = renderer.tokenizer.decode(output, skip_special_tokens=True).partition("\nQuestion:")[0]
        telling = words(record.paraphrased_answer) - frozenset.intersection(*map(words, record.perturbed_answer))
        telling -= STOP | words(record.question)
        stated = bool(telling) and 2 * len(telling & words(said)) >= len(telling)
        likeliest = right > max(wrong)
        facts.append(Fact(record.question, " ".join(said.split()), likeliest, likeliest and stated))
    return facts
