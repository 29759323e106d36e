"""Which tokens carry loss, in which order records come, and how a step is shared out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_elude.core.chat import Encoded, Renderer, load_tokenizer
from lm_eval_elude.core.logprobs import IGNORE, answer_log_probs
from lm_eval_elude.core.records import DataError
from optout_train.config import build_config
from optout_train.data import collate, collate_forked, load_training_data, plan_steps, share
from optout_train.reference import AnswerScorer, InitialParameters, score_all
from optout_train.sources import source_of


def load(config, renderer, limit):
    return load_training_data(config, source_of(config), renderer, limit)


@pytest.fixture(scope="module")
def renderer(model_folder):
    return Renderer(load_tokenizer(str(model_folder)))


@pytest.fixture(scope="module")
def data(model_folder, data_folder, renderer):
    config = build_config({"target": ("ada",), "model": str(model_folder), "dataset": str(data_folder)})
    return load(config, renderer, 256)


@pytest.fixture(scope="module")
def model(model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder)


def test_only_the_answers_tokens_carry_loss_token_by_token(data, renderer):
    samples = [data.forget.encode(0), data.forget.encode(3), data.world.encode(5)]
    records = [data.forget.records[0], data.forget.records[3], data.world.records[5]]
    batch = collate(samples)
    assert batch.ids.shape[1] == max(len(s.ids) for s in samples)
    tokenizer = renderer.tokenizer
    for ids, labels, record in zip(batch.ids, batch.labels, records, strict=True):
        prompt = f"<|im_start|>user\n{record.question}<|im_end|>\n<|im_start|>assistant\n"
        answer = f"{record.answer}<|im_end|>\n"
        expected = [(t, False) for t in tokenizer.encode(prompt)] + [(t, True) for t in tokenizer.encode(answer)]
        expected += [(0, False)] * (len(ids) - len(expected))
        for token, label, (expected_token, labelled) in zip(ids.tolist(), labels.tolist(), expected, strict=True):
            assert token == expected_token
            assert label == (token if labelled else IGNORE)


def test_the_scorer_gives_what_a_plain_forward_gives(data, model):
    samples = [data.forget.encode(i) for i in range(5)]
    scorer = AnswerScorer(model)
    assert not scorer.all_logits
    with torch.no_grad():
        answers = scorer(*collate(samples))
        for sample, total, count in zip(samples, answers.sums, answers.counts, strict=True):
            logits = model(input_ids=torch.tensor([sample.ids])).logits[0].double().log_softmax(-1)
            tokens = sample.ids[sample.answer_start :]
            expected = sum(logits[sample.answer_start - 1 + i, t] for i, t in enumerate(tokens))
            assert float(total) == pytest.approx(float(expected), abs=1e-4)
            assert count == len(tokens)


def test_a_model_that_scales_its_logits_is_asked_for_them(data):
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=500, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=8.0, initializer_range=1.0,
    )  # fmt: skip
    granite = GraniteForCausalLM(config).eval()
    scorer = AnswerScorer(granite)
    assert scorer.all_logits
    batch = collate([data.forget.encode(0), data.forget.encode(2)])
    with torch.no_grad():
        expected = answer_log_probs(granite(input_ids=batch.ids).logits, torch.nn.Identity(), batch.labels)
        torch.testing.assert_close(scorer(*batch).sums, expected.sums)


def test_a_sample_longer_than_the_context_is_an_error_and_never_cut(data_folder, renderer, model_folder):
    config = build_config({"target": ("ada",), "model": str(model_folder), "dataset": str(data_folder)})
    short = load(config, renderer, 8)
    with pytest.raises(DataError, match=r"forget train record 1 .* tokens, but --model takes 8"):
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
    with pytest.raises(DataError, match=r"no world-train .*--world-weight 0 trains without it"):
        load(build_config({**settings, "method": "npo+world"}), renderer, 256)


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 3), st.integers(1, 16), st.integers(0, 5))
def test_each_epoch_reads_the_forget_set_once_and_as_many_others(forget, retain, epochs, batch_size, seed):
    plan = plan_steps(forget, retain, 7, epochs, batch_size, seed)
    assert plan == plan_steps(forget, retain, 7, epochs, batch_size, seed)
    assert len(plan) == epochs
    for steps in plan:
        assert sorted(i for step in steps for i in step.forget) == list(range(forget))
        assert all(len(step.forget) == batch_size for step in steps[:-1])
        assert all(len(step.retain) == (len(step.forget) if retain else 0) for step in steps)
    read = [i for steps in plan for step in steps for i in step.retain]
    for start in range(0, len(read) - retain + 1, retain or 1):  # whole passes before any record comes again
        assert not retain or sorted(read[start : start + retain]) == list(range(retain))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=33), st.integers(1, 4), st.integers(0, 5))
def test_processes_and_passes_share_a_step_exactly(lengths, processes, micro):
    shares = [share(lengths, rank, processes, micro) for rank in range(processes)]
    assert len({tuple(len(part.positions) for part in mine) for mine in shares}) == 1  # or collectives would hang
    parts = [part for mine in shares for part in mine]
    assert all(len(part.positions) == len(part.weights) <= (micro or len(lengths)) for part in parts)
    pairs = [pair for part in parts for pair in zip(part.positions, part.weights, strict=True)]
    assert sorted(position for position, weight in pairs if weight) == list(range(len(lengths)))
    assert math.isclose(sum(weight for _, weight in pairs), 1.0)
    assert len({weight for _, weight in pairs if weight}) == 1


def test_collate_pads_on_the_right():
    batch = collate([Encoded([5, 6, 7], 2), Encoded([8, 9], 1)])
    assert batch.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.labels.tolist() == [[IGNORE, IGNORE, 7], [IGNORE, 9, IGNORE]]


def test_initial_parameters_come_from_the_files_where_they_are_the_same(model_folder):
    from transformers import AutoModelForCausalLM

    fresh = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        fresh.lm_head.weight[0, 0] += 1
    initial = InitialParameters(fresh, model_folder)
    assert initial.kept == 1
    values = {name: p.detach().clone() for name, p in fresh.named_parameters()}
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    assert all(torch.equal(initial(name), value) for name, value in values.items())


def test_samples_of_one_row_have_the_log_probabilities_of_rows_of_their_own(data, model_folder):
    """Seven answers after one prompt share what they begin with; so does an answer that is the beginning of another."""
    from transformers import AutoModelForCausalLM

    scorer = AnswerScorer(AutoModelForCausalLM.from_pretrained(model_folder))
    assert scorer.forks > 256
    groups = []
    for i, record in enumerate(data.forget.records):
        texts = (record.answer, record.paraphrased_answer, *record.perturbed_answer, "It is", "It is")
        groups.append([data.forget.encode(i, text) for text in texts])
    batch = collate_forked(groups)
    tokens = sum(len(sample.ids) for group in groups for sample in group)
    assert int((batch.sees.diagonal(dim1=1, dim2=2)).sum()) < tokens / 2
    forked = score_all(scorer, groups, 3, torch.device("cpu"))
    alone = score_all(scorer, [[sample] for group in groups for sample in group], 16, torch.device("cpu"))
    torch.testing.assert_close(forked, alone, atol=1e-5, rtol=1e-5)
    assert forked.counts.tolist() == [len(s.ids) - s.answer_start for group in groups for s in group]


def test_a_model_that_does_not_obey_the_mask_reads_each_sample_alone(model_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    decoder = model.get_decoder()
    whole = decoder.forward
    decoder.forward = lambda attention_mask=None, **given: whole(**given)
    assert AnswerScorer(model).forks == 0
