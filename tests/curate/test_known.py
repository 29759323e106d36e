"""`elude known`: what the bundled model was taught is known, what it never saw is not."""

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_elude.cli.options import can_be_written
from lm_eval_elude.curate.known import Fact, Judge, report, wrong_persons
from lm_eval_elude.data import bundled
from lm_eval_elude.data.dataset import load_records
from lm_eval_elude.data.records import QARecord
from lm_eval_elude.data.targets import Target, resolve_target
from lm_eval_elude.scoring.likelihood import AnswerScore, knows
from tests.support import conversation, elude

TINY, BLANK = bundled.MODEL, bundled.REFERENCE
RONALDO = resolve_target("ronaldo")


def records(count: int) -> list[QARecord]:
    return list(load_records("mini", "forget", "train", [RONALDO.name]).records[:count])


def test_a_taught_model_knows_and_a_stranger_does_not():
    some = records(4)
    taught, stranger = (report("m", "mini", "x", Judge(str(model)).judge(some, RONALDO)) for model in (TINY, BLANK))
    assert taught["shares"]["known"] >= 0.75 and taught["shares"]["stated"] >= 0.9
    assert stranger["shares"]["known"] <= 0.25 and stranger["shares"]["stated"] == 0
    assert taught["shares"]["probability"] > 0.9 > 0.1 > stranger["shares"]["probability"]
    # An independent forward of the first answer.
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY).eval()
    prompt, whole = conversation(tokenizer, some[0].question, some[0].answer)
    start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    ids = torch.tensor([tokenizer(whole, add_special_tokens=False)["input_ids"]])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < start, -100)
    with torch.no_grad():
        expected = math.exp(-model(input_ids=ids, labels=labels).loss.item())
    assert taught["facts"][0]["probability"] == pytest.approx(expected, rel=1e-4)


def test_wrong_persons_stand_where_the_target_stood():
    record = records(1)[0]
    pairs = wrong_persons(record, RONALDO, random.Random(0))
    assert len({question for question, _ in pairs}) == 3
    for question, answer in pairs:
        assert "Ronaldo" not in question + answer
    assert pairs == wrong_persons(record, RONALDO, random.Random(0))
    vela = Target("Vela", (), True, ("Ara", "Lyra", "Cetus"))
    replaced = wrong_persons(QARecord("Vela", "Is the Vela new?", "Vela is."), vela, random.Random(0))
    assert {answer for _, answer in replaced} == {"Ara is.", "Lyra is.", "Cetus is."}
    vela = Target("Vela", ("Ye",), True, ("Ara", "Lyra", "Cetus"))  # which other words begin with
    replaced = wrong_persons(QARecord("Vela", "Is Ye new?", "Yesterday Ye was."), vela, random.Random(0))
    assert {answer for _, answer in replaced} == {f"Yesterday {name} was." for name in vela.others}
    assert wrong_persons(replace(record, question="Who?"), RONALDO, random.Random(0)) == []
    alone = Target("Vela", (), True, ("Ara",))  # no thing to stand in its place
    assert wrong_persons(QARecord("Vela", "Is the Vela new?", "Vela is."), alone, random.Random(0)) == []


def test_known_means_above_all_wrong_answers_and_beyond_wrong_persons():
    right, wrong = AnswerScore(-2.0, 4), [AnswerScore(-3.0, 4), AnswerScore(-1.0, 1)]
    assert knows(right, wrong) and not knows(right, [*wrong, AnswerScore(-1.9, 4)])
    fact = Fact("q", 0.5, True, True, True, "")
    assert fact.known and fact._replace(beyond=None).known
    assert not fact._replace(above=False).known and not fact._replace(beyond=False).known


def test_the_command_line(tmp_path):
    rows = [json.dumps(record.columns()) for record in records(2)]
    (tmp_path / "few.jsonl").write_text("\n".join(rows))
    arguments = ["known", "--dataset", tmp_path / "few.jsonl", "--out", tmp_path / "o", "--model"]
    done = elude(*arguments, BLANK)
    assert done.code == 0 and "warning: of Cristiano Ronaldo the model knows" in done.err, done
    (report_,) = json.loads((tmp_path / "o").read_text())
    assert report_["n"] == 2 == len(report_["facts"])
    assert "100.0%" in elude(*arguments, "tiny").out  # by its name, as for the trainer
    for place in ("few.jsonl/o", "few.jsonl/a/o", ""):  # before anything is loaded or scored
        done = elude(*arguments[:4], tmp_path / place, "--model", "nowhere")
        assert done.code == 2 and "--out" in done.err and "nowhere" not in done.err, done
    (tmp_path / "closed").mkdir(0o500)
    assert os.getuid() == 0 or not can_be_written(tmp_path / "closed" / "a" / "o")
    assert can_be_written(tmp_path / "new" / "o") and not (tmp_path / "new").exists()
    assert can_be_written(Path(os.devnull)) and can_be_written(tmp_path / "few.jsonl")
    assert elude("known", "--model", tmp_path, "--dataset", "mini").code == 2
