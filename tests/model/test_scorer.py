"""One forward pass scores answers, alone in their rows or many in one: against plain forwards of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_elude.errors import UserError
from lm_eval_elude.model.packing import build_trees, collate, to_batch
from lm_eval_elude.model.scorer import Scorer, answer_sums, load_model, score_all
from lm_eval_elude.text.chat import Encoded
from tests.model.shapes import make

CPU = torch.device("cpu")


def expected_sums(model: Any, samples: list[Encoded]) -> torch.Tensor:
    """Each sample on its own, by the loss that transformers computes."""
    losses = []
    for ids, start in samples:
        labels = torch.tensor([[-100] * start + ids[start:]])
        losses.append(-model(torch.tensor([ids]), labels=labels).loss * (len(ids) - start))
    return torch.stack(losses)


# Two prompts with three answers each: one is the beginning of another, one stands twice.
ANSWERS = ([9, 8, 7, 6], [9, 8], [5, 9, 9]), ([9, 8], [9, 8], [4])
SAMPLES = [
    Encoded(prompt + answer, len(prompt))
    for prompt, answers in zip(([1, 2, 3], [1, 2, 3, 1, 2]), ANSWERS, strict=True)
    for answer in answers
]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma2", "granite"])
def test_sums_and_gradients_are_those_of_plain_forwards(kind: str, group: int) -> None:
    model = make(60, kind, logits_scaling=8.0)
    expected = expected_sums(model, SAMPLES)
    batch = collate(SAMPLES, group=group)
    scorer = Scorer(model)
    assert scorer.span == (24 if kind == "gemma2" else 1 << 60)
    sums, counts = answer_sums(scorer(batch)[:, 0], batch.owners)
    torch.testing.assert_close(sums, expected, atol=1e-4, rtol=1e-5)
    assert counts.tolist() == [len(ids) - start for ids, start in SAMPLES]
    weights = torch.arange(1.0, 7)
    gradients = [torch.autograd.grad((weights * side).sum(), [*model.parameters()]) for side in (sums, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_the_vocabulary_is_computed_where_an_answer_token_is_predicted_and_once() -> None:
    model, rows = make(60), []
    scorer = Scorer(model)
    model.lm_head.register_forward_hook(lambda module, given, logits: rows.append(logits.flatten(0, -2).shape[0]))
    for group in 1, 3:
        scorer(collate(SAMPLES, group=group))
    # In one row: six places that predict in the first prompt's answers, two in the second's.
    assert rows == [14, 8]


@cache
def llama_scorer() -> Scorer:
    return Scorer(make(60))


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=8), min_size=1, max_size=9), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_batches_groups_and_padding_do_not_matter(sequences: list[list[int]], batch_size: int) -> None:
    scorer = llama_scorer()
    samples = [Encoded(ids, 1 + i % (len(ids) - 1)) for i, ids in enumerate(sequences)]
    alone, grouped = (score_all(scorer, samples, batch_size, group) for group in (1, 3))
    torch.testing.assert_close(alone.sums.float(), expected_sums(scorer.model, samples), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(grouped, alone, atol=1e-4, rtol=1e-4)
    assert alone.counts.tolist() == [len(ids) - start for ids, start in samples]
    torch.testing.assert_close(alone.means.exp().log() * alone.counts, alone.sums)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.sampled_from([0, 1, 64])
)
def test_trees_spell_their_sequences_and_branches_do_not_see_each_other(sequences: list[list[int]], width: int) -> None:
    trees = build_trees(dict(enumerate(sequences)), width, 40)
    assert sorted(member for tree in trees for member in tree.members) == list(range(len(sequences)))
    batch = to_batch(trees, [Encoded([*ids, 0], len(ids)) for ids in sequences], CPU)
    assert batch.depths is not None and batch.sees is not None
    for row, tree in enumerate(trees):
        for member, path in zip(tree.members, tree.paths, strict=True):
            assert batch.tokens[row, path].tolist() == sequences[member]
            assert batch.depths[row, path].tolist() == list(range(len(path)))
            for depth, node in enumerate(path):
                assert batch.sees[row, node].nonzero()[:, 0].tolist() == path[: depth + 1]
        # A prefix is one node of its tree, however many sequences begin with it.
        assert len(tree.tokens) == len(
            {tuple(sequences[m][: i + 1]) for m in tree.members for i in range(len(sequences[m]))}
        )
    if width == 0:
        assert len(trees) == len(sequences)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=4))
def test_what_shares_an_opening_becomes_one_tree(sequences: list[list[int]]) -> None:
    """Where tokens are dear (a wide model) and pairs of tokens are not: as many trees as there are first tokens."""
    numbered = dict(enumerate(sequences))
    trees = build_trees(numbered, 1 << 20, 40)
    assert len(trees) == len({sequence[0] for sequence in sequences})
    assert sum(len(tree.tokens) for tree in trees) == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})
    assert all(len(tree.tokens) <= 5 or len(tree.members) == 1 for tree in build_trees(numbered, 1 << 20, 5))


def test_half_precision_is_summed_in_float32() -> None:
    exact, half = make(60), make(60).to(torch.bfloat16)
    log_probs = Scorer(half)(collate(SAMPLES))
    assert log_probs.dtype == torch.float32
    assert (log_probs - Scorer(exact)(collate(SAMPLES))).abs().mean() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_obey_the_mask_reads_each_sample_alone(dtype: torch.dtype) -> None:
    model = make(60).to(dtype)
    assert Scorer(model).span > 0
    whole = model.get_decoder().forward
    model.get_decoder().forward = lambda attention_mask=None, **given: whole(**given)
    scorer = Scorer(model)
    assert scorer.span == 0
    if dtype == torch.float32:
        sums = score_all(scorer, SAMPLES, 4, group=3).sums
        torch.testing.assert_close(sums.float(), expected_sums(model, SAMPLES).detach(), atol=1e-4, rtol=1e-4)


def test_no_code_of_a_checkpoint_runs_and_no_pickle_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    """Not even where someone answers the question whether to trust it with yes."""
    make(60).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text()
        .replace('"llama"', '"strange"')
        .replace("{", '{"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},', 1)
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nOwn = object")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UserError, match=r"--model .* cannot be loaded"):
        load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_model_stays_in_the_mode_that_it_was_in() -> None:
    """Dropout between two scorings of one model would make the second another."""
    model = make(60, "gpt2", resid_pdrop=0.5)
    samples = [Encoded([1, 2, 3, 4], 2)]
    for training in (False, True):
        scorer = Scorer(model.train(training))
        sums = [score_all(scorer, samples, 1).sums for _ in range(2)]
        assert torch.equal(*sums) and model.training == scorer.training == training
