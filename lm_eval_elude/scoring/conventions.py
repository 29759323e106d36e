"""How TOFU's two evaluators ask and score: the wording of a prompt, the system turn, and how much is generated."""

from __future__ import annotations

from typing import NamedTuple

from lm_eval_elude.text.chat import Wording


class Convention(NamedTuple):
    """How an evaluator asks and scores.

    Attributes:
        wording: of prompt and answer; None for the model's chat template.
        system: text of the system turn, "" for none.
        records: at most so many of a set, 0 for all.
        new_tokens: of an answer, with the prompt's counted in where ``with_prompt``.
    """

    wording: Wording | None
    system: str
    records: int
    new_tokens: int = 200
    with_prompt: bool = True


# The released evaluator's two prompts (its loss takes in the answer's tag), and open-unlearning's.
CONVENTIONS = {
    "released": Convention(Wording("Question: {question}\n", "Answer: "), "", 300),
    "released-llama2": Convention(Wording("[INST] {question} [/INST]", ""), "", 300),
    "open-unlearning": Convention(None, "You are a helpful assistant.", 0, with_prompt=False),
}
