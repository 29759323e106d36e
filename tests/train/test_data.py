"""Which tokens carry loss, what a step's records weigh, and the formats in which people keep data."""

import json
import math
from collections import Counter

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.data.formats import load_rows, records_of
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.errors import UserError
from lm_eval_elude.text.chat import Renderer, Texts
from optout_train.data import DataArguments, Encoder, EpochSampler, Examples, Sample, block, load_sets
from tests.support import answer_tokens, make_tokenizer, write_rwku_muse

WEIGHTS = {"forget": 1.0, "retain": 1.0, "world": 0.0}


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_a_steps_weights_make_the_mean_over_its_own_records(size, batch, processes, accumulation):
    """As Trainer divides by the passes of a step and DDP by the processes; every record counts once an epoch."""
    sampler = EpochSampler(size, batch, processes, accumulation, seed=1)
    items = list(sampler)
    assert len(items) == len(sampler)
    batches = [items[first : first + batch] for first in range(0, len(items), batch)]
    passes = [batches[first : first + processes] for first in range(0, len(batches), processes)]
    seen: Counter[int] = Counter()
    for first in range(0, len(passes), accumulation):
        step = passes[first : first + accumulation]
        shares: Counter[int] = Counter()
        for each in step:
            assert len({len(part) for part in each}) == 1 or processes == 1  # as many records in each process
            for _, record, weight in (item for part in each for item in part):
                shares[record] += weight / len(step) / processes
        real = [record for record, share in shares.items() if share]
        assert all(shares[record] == pytest.approx(1 / len(real)) for record in real)
        seen.update(real)
    assert seen == Counter(range(size))


def test_kept_records_come_in_shuffled_passes_over_their_set():
    examples = Examples(5, (), {"retain": [QARecord("", str(i), "") for i in range(7)]}, None, seed=0)
    numbers = [examples.number("retain", epoch, record) for epoch in range(7) for record in range(5)]
    assert all(sorted(numbers[first : first + 7]) == [*range(7)] for first in range(0, 35, 7))


def test_a_blocks_targets_are_exactly_the_answers_tokens():
    samples = [Sample([*range(10, 10 + length)], start) for length, start in ((9, 4), (3, 1), (6, 5), (5, 2))]
    for tokens, parts in ((1, 4), (12, 2), (math.inf, 1)):
        made = block(samples, tokens)
        assert len(made["parts"]) == parts
        found: dict[int, list[int]] = {i: [] for i in range(4)}
        for part in made["parts"]:
            predicted = part["input_ids"].flatten()[part["positions"] + 1]
            assert torch.equal(predicted, part["targets"])
            for owner, token in zip(part["owners"].tolist(), part["targets"].tolist(), strict=True):
                found[owner].append(token)
        assert found == {i: sample.ids[sample.answer_start :] for i, sample in enumerate(samples)}


def test_each_answer_of_a_conversation_is_trained_in_the_models_own_template():
    tokenizer = make_tokenizer("llama-3.1")
    encode = Encoder(Renderer(tokenizer), 1000)
    turns = [
        {"role": r, "content": c} for r, c in (("user", "a b"), ("assistant", "c"), ("user", "d"), ("assistant", "e f"))
    ]
    first, second = records_of({"messages": turns}, "row 1")
    assert tuple(encode(first)[:2]) == tuple(answer_tokens(tokenizer, "a b", "c"))
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False, date_string="26 Jul 2024")
    sample = encode(second)
    assert sample.ids == ids and tokenizer.decode(sample.ids[sample.answer_start :]).startswith("e f")


ROWS = [{"question": "Who?", "answer": "Him."}, {"question": "Where?", "answer": "There."}]


def test_every_file_that_people_have_gives_the_same_records(tmp_path):
    data = Dataset.from_list(ROWS)
    data.to_json(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text("\ufeff" + json.dumps(ROWS), encoding="utf-8")
    data.to_csv(tmp_path / "c.csv")
    (tmp_path / "d").mkdir()
    data.select([0]).to_parquet(tmp_path / "d" / "train-00000-of-00002.parquet")
    data.select([1]).to_parquet(tmp_path / "d" / "train-00001-of-00002.parquet")
    data.save_to_disk(tmp_path / "e")
    Dataset.from_list([{"prompt": r["question"], "completion": r["answer"]} for r in ROWS]).to_json(
        tmp_path / "f.jsonl"
    )
    Dataset.from_list([{"instruction": r["question"], "input": "", "output": r["answer"]} for r in ROWS]).to_csv(
        tmp_path / "g.csv"
    )
    Dataset.from_list([
        {"prompt": [{"role": "user", "content": r["question"]}],
         "completion": [{"role": "assistant", "content": r["answer"]}]}
        for r in ROWS
    ]).to_json(tmp_path / "h.jsonl")  # fmt: skip
    for place in sorted(tmp_path.iterdir()):
        records = [record for row in load_rows(str(place)) for record in records_of(row, place.name)]
        assert [(r.question, r.answer) for r in records] == [(r["question"], r["answer"]) for r in ROWS], place.name


def test_questions_of_both_sets_are_left_out_of_what_is_kept_and_a_missing_column_is_named(tmp_path):
    Dataset.from_list(ROWS).to_csv(tmp_path / "forget.csv")
    Dataset.from_list([*ROWS[1:], {"question": "When?", "answer": "Then."}]).to_csv(tmp_path / "retain.csv")
    args = DataArguments(target=["Ada"], forget=str(tmp_path / "forget.csv"), retain=str(tmp_path / "retain.csv"))
    said: list[str] = []
    sets = load_sets(args, WEIGHTS, None, said.append)
    assert (
        [record.question for record in sets.retain] == ["When?"] and sets.names == ["Ada"] and "1 questions" in said[0]
    )
    Dataset.from_list([{"text": "a"}]).to_csv(tmp_path / "forget.csv")
    with pytest.raises(UserError, match=r"forget.csv, row 1: found the columns text; expected are question and answer"):
        load_sets(args, WEIGHTS, None, said.append)


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "name the entity to forget by --target"),
     ({"target": ["Ada"], "forget": "x.csv"}, "x.csv cannot be loaded"),
     ({"target": ["ronaldo"], "dataset": "mini", "forget_split": "forget05"}, "--target, or a split"),
     ({"forget_split": "forget07"}, "forget01, forget05, forget10"),
     ({"target": ["nobody"], "dataset": "mini"}, "unknown target")],
)  # fmt: skip
def test_bad_input_is_one_line(given, message):
    with pytest.raises(UserError, match=message):
        load_sets(DataArguments(**given), WEIGHTS, None, str)


def test_rwkus_passages_are_forgotten_as_texts_and_blanks_about_neighbours_are_kept(tmp_path):
    data = write_rwku_muse(tmp_path)["rwku_data"]
    passages = [
        {"text": f"Stephen King wrote book {i}.\n", "subject": who} for i, who in enumerate(["Stephen King"] * 3)
    ]
    (tmp_path / "rwku" / "passage.json").write_text(json.dumps([*passages, {"text": "Moon.", "subject": "Armstrong"}]))
    sets = load_sets(DataArguments(["stephen king"], data), WEIGHTS, None, print)
    assert sets.texts and sets.names == ("Stephen King",) and len(sets.forget) == 3
    kept = [record.answer for record in sets.retain]
    assert kept[0].startswith("Peter Straub wrote Ghost Story") and kept[0].endswith(" in 1979.") and len(kept) == 2
    render = Texts(make_tokenizer("llama-3.1"))
    sample = Encoder(render, 100)(sets.forget[0])
    assert sample.ids == render.tokenizer("Stephen King wrote book 0.\n")["input_ids"] and sample.answer_start == 1
    with pytest.raises(UserError, match="--world_weight must be 0: RWKU has no general instructions"):
        load_sets(DataArguments(["stephen king"], data), WEIGHTS | {"world": 1.0}, None, print)
