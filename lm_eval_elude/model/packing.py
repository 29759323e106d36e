"""Samples with common openings as trees: each opening is computed once, and a tree is one row of a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm_eval_elude.text.chat import Encoded


class Tree:
    """Sequences of tokens with their common prefixes merged, the nodes in depth-first order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of each node
        self.depths: list[int] = []  # of each node
        self.ends: list[int] = []  # of each node; its descendants are the nodes after it and before its end
        self.paths: list[list[int]] = []  # of each sequence, the nodes of its tokens
        self.members: list[int] = []  # the caller's number of each sequence
        self.last: list[int] = []  # the sequence that was added last

    def common_prefix(self, sequence: list[int]) -> int:
        """How many first tokens a sequence shares with the one that was added last."""
        length = min(len(self.last), len(sequence))
        return next((i for i in range(length) if self.last[i] != sequence[i]), length)

    def add(self, member: int, sequence: list[int]) -> None:
        """Append a sequence that does not come before the last one in the order of lists."""
        shared, start = self.common_prefix(sequence), len(self.tokens)
        end = start + len(sequence) - shared
        path = [*(self.paths[-1][:shared] if shared else []), *range(start, end)]
        self.tokens += sequence[shared:]
        self.depths += range(shared, len(sequence))
        self.ends += [0] * (end - start)
        for node in path:
            self.ends[node] = end
        self.paths.append(path)
        self.members.append(member)
        self.last = sequence


def build_trees(sequences: Mapping[int, list[int]], width: int, limit: int) -> list[Tree]:
    """Sort sequences (none empty), each with the caller's number, into trees, the longest tree first.

    A sequence joins the tree before it where that saves work: in each layer a token costs about 24 width^2 operations
    and a pair of tokens of one row 4 width, and the pairs across branches are for nothing. They count four times here:
    attention under a mask is slower than a matrix product, and what joins later pays for a longer row too. Width 0
    gives every sequence a tree of its own. A tree of several sequences has at most ``limit`` tokens.
    """
    trees: list[Tree] = []
    for member in sorted(sequences, key=lambda member: sequences[member]):
        sequence = sequences[member]
        size, shared = (len(trees[-1].tokens), trees[-1].common_prefix(sequence)) if trees else (0, 0)
        new = len(sequence) - shared
        if not width or not trees or size + new > limit or 6 * width * shared < 8 * new * (size - shared):
            trees.append(Tree())
        trees[-1].add(member, sequence)
    return sorted(trees, key=lambda tree: -len(tree.tokens))


class Batch(NamedTuple):
    """Answers laid out for one forward pass; rows are padded on the right.

    Attributes:
        tokens: (rows, length) token ids.
        places: (m,) where the next token is asked for: indices into the flattened ``tokens``, ascending, each once.
        rows: (n,) of each answer token, which of ``places`` predicts it; answers with a common opening share some.
        targets: (n, k) the token ids whose log-probabilities are wanted there, the answer's own token first.
        owners: (n,) the number of the sample that each answer token belongs to.
        depths: (rows, length) positions; None where every row is one sequence.
        sees: (rows, length, length) whether a query (second axis) sees a key: itself and its ancestors; or None.
    """

    tokens: Tensor
    places: Tensor
    rows: Tensor
    targets: Tensor
    owners: Tensor
    depths: Tensor | None = None
    sees: Tensor | None = None


def to_batch(trees: Sequence[Tree], samples: Sequence[Encoded], device: torch.device, masked: bool = True) -> Batch:
    """Write trees into the tensors of one forward pass.

    The trees are laid out from the samples' ids, all of them or all but the last, which predicts nothing. Each answer
    starts at 1 or later. Trees of one sequence do without positions and mask (``masked=False``).
    """

    def padded(rows: Iterable[list[int]]) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)

    tokens = padded(tree.tokens for tree in trees)
    predicting, targets, owners = [], [], []
    for row, tree in enumerate(trees):
        for member, path in zip(tree.members, tree.paths, strict=True):
            ids, start = samples[member].ids, samples[member].answer_start
            predicting += [row * tokens.shape[1] + node for node in path[start - 1 : len(ids) - 1]]
            targets += [[token] for token in ids[start:]]
            owners += [member] * (len(ids) - start)
    places, rows = torch.tensor(predicting).unique(return_inverse=True)
    answers = (places, rows, torch.tensor(targets), torch.tensor(owners))
    batch = Batch(tokens, *(column.to(device) for column in answers))
    if not masked:
        return batch
    ends, index = padded(tree.ends for tree in trees), torch.arange(tokens.shape[1], device=device)
    ends = ends.maximum(index + 1)  # padding sees itself alone: no row of the mask is empty
    sees = (index[:, None] >= index) & (index[:, None] < ends[:, None, :])
    return batch._replace(depths=padded(tree.depths for tree in trees), sees=sees)


def collate(samples: Sequence[Encoded], device: torch.device | str = "cpu", group: int = 1) -> Batch:
    """Samples as the rows of one forward pass; of ``group`` consecutive ones, those with a common opening share one."""
    trees: list[Tree] = []
    for first in range(0, len(samples), group):
        members = range(first, min(first + group, len(samples)))
        trees += build_trees({i: samples[i].ids for i in members}, width=1 << 20, limit=1 << 20)
    return to_batch(trees, samples, torch.device(device), masked=group > 1)
