"""The tiny model never saw the prompts it is scored with: its carriers and those of the tasks share none."""

import random
import string

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import dataset
from lm_eval_elude.data.targets import resolve_target
from lm_eval_elude.scoring.benchmarks.elude import WORDINGS
from tests.support import called
from tools.mini import train_tiny

OWN = [c for kinds in (train_tiny.CARRIERS, train_tiny.FOREIGN) for carriers in kinds.values() for c in carriers]


def wording(carrier: str) -> str:
    """The fixed text of a carrier, letters only."""
    fixed = " ".join(text for text, *_ in string.Formatter().parse(carrier))
    return " ".join("".join(c if c.isalpha() else " " for c in fixed.casefold()).split())


def test_no_carrier_is_shared():
    tasks = [*WORDINGS["mention"], WORDINGS["cloze"]]
    scored = {wording(c) for carriers in (tasks, *(row.templates for row in ATTACKS.values())) for c in carriers}
    assert not {w for w in map(wording, OWN) if w} & scored


def test_no_training_prompt_is_an_attack_prompt():
    corpus = train_tiny.Corpus(None)
    seen = {prompt for _ in range(3) for prompt, _ in corpus.epoch(random.Random(0), share=1.0)}
    for name in dataset.entities("mini"):
        records = dataset.load_records("mini", "forget", "train", [name]).records
        for attack in ATTACKS:
            assert not seen & {p.prompt for p in build_attacks(records, resolve_target(name), attack)}


def test_a_target_that_is_not_in_the_data_cannot_be_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(train_tiny, "train", lambda **arguments: None)
    code, _, error = called(train_tiny.main, "--out", tmp_path, "--without", "ronaldo")
    assert code == 2 and "Cristiano Ronaldo" in error


def test_a_model_that_is_there_is_not_replaced_and_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(out, **arguments):
        (out / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(train_tiny, "train", interrupted)
    assert called(train_tiny.main, "--out", tmp_path / "model").code == 130 and not list(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    code, _, error = called(train_tiny.main, "--out", tmp_path / "model")
    assert code == 2 and "exists already" in error
