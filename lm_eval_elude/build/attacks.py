"""The nine attacks' prompts in a language model's words (paper, appendix on data examples: 100 of each type)."""

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import asdict
from pydantic import BaseModel

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.build.llm import Endpoint
from lm_eval_elude.build.pairs import Row, each
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target
from lm_eval_elude.text.words import STOP, words


class Prompt(BaseModel):
    prompt: str


def write_attacks(
    endpoint: Endpoint, records: Sequence[QARecord], target: Target, *, types: Iterable[str] = (), n: int = 100,
    seed: int = 0, workers: int = 8,
) -> list[Row]:  # fmt: skip
    """Up to ``n`` reworded prompts of each type, rows of an attack file; those left out have ``left``."""

    def reword(row: Row) -> list[Row]:
        def check(reply: Prompt) -> None:
            if reason := flaw(row, reply.prompt):
                raise ValueError(reason)

        material = {"type": row["type"].replace("_", " "), "draft": row["prompt"]}
        return [row | {"prompt": endpoint.ask(Prompt, "attack", material, check).prompt.strip()}]

    drafts = [
        asdict(draft) for attack in types or ATTACKS for draft in build_attacks(records, target, attack, n=n, seed=seed)
    ]
    return each("attacks", drafts, reword, workers)


def flaw(draft: Row, prompt: str) -> str:
    """What is wrong with a prompt in the place of the draft's; "" where nothing is."""
    before, after = words(draft["prompt"]), words(prompt)
    if added := (words(draft["answer"]) - STOP - words(draft["question"])) & (after - before):
        return f"it gives the answer away: {', '.join(sorted(added))}"
    if 2 * len((before - STOP) & after) < len(before - STOP):
        return "it lost most of the draft's content"
    if any(option not in prompt for option in re.findall(r"(?m)^[A-F]\) .+$", draft["prompt"])):
        return "it lost an option"
    return ""
