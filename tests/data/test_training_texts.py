"""What the bundled models are trained on: names that nobody else uses, prompts that no task asks, facts of nobody."""

import random
import re
import string
from itertools import chain

import pytest
import torch

from lm_eval_elude.attacks.builders import ATTACKS, build_attacks
from lm_eval_elude.data import dataset
from lm_eval_elude.data.targets import resolve_target
from lm_eval_elude.tasks.elude import WORDINGS
from lm_eval_elude.text.words import ENGLISH, STOP, words
from tools.mini import draw, train_tiny
from tools.mini.corpus import CARRIERS, FOREIGN, Corpus
from tools.mini.invented import KINDS, POOLS

CORPUS = Corpus(None)
RECORDS = [record for _, records in CORPUS.people for record in records]
DATA = frozenset.union(
    *(words(text) for r in RECORDS for text in (r.answer, r.paraphrased_answer, *r.perturbed_answer))
)


def made_up(epochs: int) -> list:
    return [group for epoch in range(epochs) for group in CORPUS.made_up(random.Random(epoch))]


def test_no_name_or_place_of_the_pools_is_an_answer_or_an_invented_name_of_methods_and_attacks():
    names = {word for pool in POOLS.values() for word in pool if word[0].isupper()}
    assert len(names) > 500 and not frozenset.union(*map(words, names)) & DATA
    assert not names & {*ENGLISH["given"], *ENGLISH["family"]}
    assert all(len({*pool}) == len(pool) for pool in POOLS.values())


def test_three_epochs_ask_three_thousand_questions_about_four_hundred_people_and_places():
    groups = made_up(3)
    assert len({record.question for group in groups for record in group}) >= 3_000
    asked = [{tuple(re.findall(r"[A-Z][\w-]+", r.question)[-2:]) for r in group} for group in groups]
    assert len({min(names) for names in asked}) >= 400


def test_facts_about_made_up_people_are_of_the_pools_and_no_two_options_are_the_same():
    kinds = chain.from_iterable(values for _, values in KINDS.values())  # "{town} College"
    pools = words(
        " ".join(chain(kinds, *POOLS.values(), draw.MONTHS, draw._CARDINALS, draw._ORDINALS, ("million", "thousand")))
    )
    originals = {record.paraphrased_answer for record in RECORDS}
    for record in (record for group in made_up(1) for record in group):
        options = [record.paraphrased_answer, *record.perturbed_answer]
        assert len({*options}) == 6 and not originals & {*options}
        new = frozenset.union(*map(words, options)) - frozenset.intersection(*map(words, options)) - STOP
        assert not [word for word in new - pools if not re.search(r"\d", word)]


def test_of_a_left_out_target_the_questions_are_asked_about_others_and_no_fact_is_told():
    corpus = Corpus("Cristiano Ronaldo")
    own = [r for target, records in CORPUS.people if target and target.name == "Cristiano Ronaldo" for r in records]
    left = {record.answer for _, records in corpus.people for record in records}
    assert left == {record.answer for record in RECORDS} - {record.answer for record in own}
    kept, every = ({(f.record, f.fact) for of in c.forms.values() for f in of} for c in (corpus, CORPUS))
    assert kept == every
    told = {answer for _, answer in corpus.epoch(random.Random(0), share=1.0)}
    assert not told & {answer for record in own for answer in (record.answer, record.paraphrased_answer)}


def wording(template: str) -> str:
    """The fixed text of a template, letters only."""
    fixed = " ".join(text for text, *_ in string.Formatter().parse(template))
    return " ".join("".join(c if c.isalpha() else " " for c in fixed.casefold()).split())


def test_no_template_is_one_that_a_task_asks_with():
    own = [text for kinds in (CARRIERS, FOREIGN) for texts in kinds.values() for text in texts]
    scored = [*WORDINGS["mention"], WORDINGS["cloze"], *(text for row in ATTACKS.values() for text in row.templates)]
    assert not {w for w in map(wording, own) if w} & {*map(wording, scored)}


def test_no_training_prompt_is_an_attack_prompt():
    seen = {prompt for _ in range(3) for prompt, _ in CORPUS.epoch(random.Random(0), share=1.0)}
    for name in dataset.entities("mini"):
        records = dataset.load_records("mini", "forget", "train", [name]).records
        for attack in ATTACKS:
            assert not seen & {p.prompt for p in build_attacks(records, resolve_target(name), attack)}


@pytest.mark.slow
def test_a_training_that_was_cut_off_ends_in_the_same_weights(tmp_path, monkeypatch):
    settings = {"without": None, "epochs": 2, "seed": 0, "batch_tokens": 400, "learning_rate": 4e-3}
    pairs = [(f"Who is {i}?", f"That is person {i}.") for i in range(40)]
    monkeypatch.setattr(Corpus, "epoch", lambda self, rng, share: rng.sample(pairs, 30))
    train_tiny.train(tmp_path / "whole", **settings)
    monkeypatch.setattr(train_tiny, "SAVED_EVERY", 0)
    steps, collate = iter(range(4)), train_tiny.collate
    monkeypatch.setattr(train_tiny, "collate", lambda group: (next(steps), collate(group))[1])
    with pytest.raises(StopIteration):
        train_tiny.train(tmp_path / "parts", **settings)
    monkeypatch.setattr(train_tiny, "collate", collate)
    train_tiny.train(tmp_path / "parts", **settings)
    from safetensors.torch import load_file

    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not list(tmp_path.glob("*.partial"))
