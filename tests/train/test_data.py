"""Which tokens carry loss, in which order records come, and how a step is shared out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.errors import UserError
from lm_eval_elude.model.packing import collate
from lm_eval_elude.text.chat import Renderer, load_tokenizer
from optout_train.config import build_config
from optout_train.data import load_training_data, plan_steps, share
from optout_train.sources import source_of
from optout_train.weights import InitialParameters


def load(config, renderer, limit):
    return load_training_data(config, source_of(config), renderer, limit)


@pytest.fixture(scope="module")
def renderer(model_folder):
    return Renderer(load_tokenizer(str(model_folder)))


@pytest.fixture(scope="module")
def data(model_folder, data_folder, renderer):
    config = build_config({"target": ("ada",), "model": str(model_folder), "dataset": str(data_folder)})
    return load(config, renderer, 256)


def test_only_the_answers_tokens_carry_loss_token_by_token(data, renderer):
    samples = [data.forget.encode(0), data.forget.encode(3), data.world.encode(5)]
    records = [data.forget.records[0], data.forget.records[3], data.world.records[5]]
    batch = collate(samples)
    length = batch.tokens.shape[1]
    assert length == max(len(s.ids) for s in samples)
    tokenizer = renderer.tokenizer
    predicted = dict(zip(batch.places[batch.rows].tolist(), batch.targets[:, 0].tolist(), strict=True))
    for row, record in enumerate(records):
        prompt = tokenizer.encode(f"<|im_start|>user\n{record.question}<|im_end|>\n<|im_start|>assistant\n")
        answer = tokenizer.encode(f"{record.answer}<|im_end|>\n")
        assert batch.tokens[row].tolist() == prompt + answer + [0] * (length - len(prompt) - len(answer))
        carried = [predicted.pop(row * length + i, None) for i in range(length)]
        assert carried == [None] * (len(prompt) - 1) + answer + [None] * (length - len(prompt) - len(answer) + 1)
    assert not predicted


def test_a_sample_longer_than_the_context_is_an_error_and_never_cut(data_folder, renderer, model_folder):
    config = build_config({"target": ("ada",), "model": str(model_folder), "dataset": str(data_folder)})
    short = load(config, renderer, 8)
    with pytest.raises(UserError, match=r"forget train record 1 .* tokens, but --model takes 8"):
        short.forget.encode(0)


def test_refusals_are_drawn_once_for_each_record_and_by_the_seed(data, data_folder, renderer, model_folder):
    settings = {"target": ("ada",), "model": str(model_folder), "dataset": str(data_folder)}
    again = load(build_config(settings), renderer, 256)
    other = load(build_config({**settings, "seed": 1}), renderer, 256)
    assert data.sequences == again.sequences != other.sequences
    assert len(data.sequences["refusal"]) == len(data.forget)


def test_sets_of_weight_zero_are_not_read(tmp_path, data_folder, renderer, model_folder):
    (tmp_path / "forget_qa-train.jsonl").write_text((data_folder / "forget_qa-train.jsonl").read_text())
    settings = {"target": ("ada",), "model": str(model_folder), "dataset": str(tmp_path)}
    alone = load(build_config({**settings, "method": "npo"}), renderer, 256)
    assert len(alone.retain) == len(alone.world) == 0
    with pytest.raises(UserError, match=r"no world-train .*--world-weight 0 trains without it"):
        load(build_config({**settings, "method": "npo+world"}), renderer, 256)


@given(
    st.integers(1, 40), st.integers(0, 60), st.integers(1, 3), st.integers(1, 16), st.integers(0, 5), st.integers(1, 3)
)
def test_each_epoch_reads_the_forget_set_once_and_so_many_others(forget, retain, epochs, batch_size, seed, ratio):
    plan = plan_steps(forget, retain, 7, epochs, batch_size, seed, ratio)
    assert plan == plan_steps(forget, retain, 7, epochs, batch_size, seed, ratio)
    assert len(plan) == epochs
    for steps in plan:
        assert sorted(i for step in steps for i in step.forget) == list(range(forget))
        assert all(len(step.forget) == batch_size for step in steps[:-1])
        assert all(len(step.retain) == (ratio * len(step.forget) if retain else 0) for step in steps)
    read = [i for steps in plan for step in steps for i in step.retain]
    for start in range(0, len(read) - retain + 1, retain or 1):  # whole passes before any record comes again
        assert not retain or sorted(read[start : start + retain]) == list(range(retain))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=33), st.integers(1, 4), st.integers(0, 5))
def test_processes_and_passes_share_a_step_exactly(lengths, processes, micro):
    shares = [share(lengths, rank, processes, micro) for rank in range(processes)]
    assert len({len(mine) for mine in shares}) == 1  # or collectives would hang
    parts = [part for mine in shares for part in mine]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sum(map(len, parts)) == max(len(lengths), len(parts))  # nothing is computed that does not count
    assert all(len(part) <= (micro or len(lengths)) for part in parts)
    pairs = [pair for part in parts for pair in part]
    assert sorted(position for position, weight in pairs if weight) == list(range(len(lengths)))
    assert math.isclose(sum(weight for _, weight in pairs), 1.0)
    assert len({weight for _, weight in pairs if weight}) == 1


def test_initial_parameters_come_from_the_files_where_they_are_the_same(model_folder):
    from transformers import AutoModelForCausalLM

    fresh = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        fresh.lm_head.weight[0, 0] += 1
    initial = InitialParameters(fresh, model_folder)
    assert len(initial.copies) == 1
    values = {name: p.detach().clone() for name, p in fresh.named_parameters()}
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    assert all(torch.equal(initial(name), value) for name, value in values.items())
