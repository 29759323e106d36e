"""Which facts a model knows, before they are unlearned: where it knows few, forget quality says nothing."""

from collections.abc import Sequence
from typing import Any

from lm_eval_elude.data.records import QARecord
from lm_eval_elude.text.words import fact_tokens, words

FEW = 20  # facts below which a score says little


def probe(model: str, records: Sequence[QARecord], batch_size: int = 16) -> list[dict[str, Any]]:
    """What a model makes of each record: ``question``, ``said`` (its own answer, greedy), ``likeliest`` and ``known``.

    Likeliest is a paraphrased answer that is likelier, a token, than every wrong one: by luck in 1 of 6. Known is one
    that is likeliest and of which the model said half or more of the words that tell it from the wrong ones.
    """
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
        fact = fact_tokens(record)
        stated = 2 * len(fact & words(said)) >= len(fact) > 0
        likeliest = right > max(wrong)
        said = " ".join(said.split())
        facts.append({"question": record.question, "said": said, "likeliest": likeliest, "known": likeliest and stated})
    return facts
