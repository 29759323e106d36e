"""The nine attacks' prompts in a language model's words (paper, appendix on data examples: 100 of each type)."""

from collections.abc import Iterable, Sequence

from msgspec.structs import asdict
from pydantic import BaseModel

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks, flaw
from lm_eval_elude.attacks.prompt import AttackPrompt
from lm_eval_elude.build.llm import Endpoint
from lm_eval_elude.build.pairs import Row, each
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target


class Prompt(BaseModel):
    prompt: str


def write_attacks(
    endpoint: Endpoint, records: Sequence[QARecord], target: Target, *, types: Iterable[str] = (), n: int = 100,
    seed: int = 0, workers: int = 8,
) -> list[Row]:  # fmt: skip
    """Up to ``n`` reworded prompts of each type, rows of an attack file; those left out have ``left``."""

    def reword(row: Row) -> list[Row]:
        draft = AttackPrompt(**row)

        def check(reply: Prompt) -> None:
            if reason := flaw(draft, reply.prompt, records[draft.record], target):
                raise ValueError(reason)

        material = {"type": draft.type.replace("_", " "), "draft": draft.prompt}
        return [row | {"prompt": endpoint.ask(Prompt, "attack", material, check).prompt.strip()}]

    drafts = [
        asdict(draft) for attack in types or ATTACKS for draft in build_attacks(records, target, attack, n=n, seed=seed)
    ]
    return each("attacks", drafts, reword, workers)
