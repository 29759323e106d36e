"""The bundled model never saw the prompts it is scored with: its templates and those of the tasks share none."""

import random
import string

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import dataset
from lm_eval_elude.data.targets import resolve_target
from lm_eval_elude.tasks.elude import WORDINGS
from tools.mini import train_tiny

OWN = [t for kinds in (train_tiny.CARRIERS, train_tiny.FOREIGN) for templates in kinds.values() for t in templates]


def wording(template: str) -> str:
    """The fixed text of a template, letters only."""
    fixed = " ".join(text for text, *_ in string.Formatter().parse(template))
    return " ".join("".join(c if c.isalpha() else " " for c in fixed.casefold()).split())


def test_no_template_is_shared():
    tasks = [*WORDINGS["mention"], WORDINGS["cloze"]]
    scored = {wording(t) for templates in (tasks, *(row.templates for row in ATTACKS.values())) for t in templates}
    assert not {w for w in map(wording, OWN) if w} & scored


def test_no_training_prompt_is_an_attack_prompt():
    corpus = train_tiny.Corpus(None)
    seen = {prompt for _ in range(3) for prompt, _ in corpus.epoch(random.Random(0), share=1.0)}
    for name in dataset.entities("mini"):
        records = dataset.load_records("mini", "forget", "train", [name]).records
        for attack in ATTACKS:
            assert not seen & {p.prompt for p in build_attacks(records, resolve_target(name), attack)}
