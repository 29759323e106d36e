"""Samples with common openings as trees: each opening is computed once, and a tree is one row of a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def build_trees(sequences: Sequence[list[int]], width: int, limit: int) -> list[Tree]:
    """Sort sequences (none empty) into trees, the longest tree first.

    A sequence joins the tree before it where that saves work: in each layer a token costs about 24 width^2 operations
    and a pair of tokens of one row 4 width, and the pairs across branches are for nothing. They count four times here:
    attention under a mask is slower than a matrix product, and what joins later pays for a longer row too. Width 0
    gives every sequence a tree of its own. A tree of several sequences has at most ``limit`` tokens.
    """
    trees: list[Tree] = []
    for member in sorted(range(len(sequences)), key=sequences.__getitem__):
        sequence = sequences[member]
        size, shared = (len(trees[-1].tokens), trees[-1].common_prefix(sequence)) if trees else (0, 0)
        new = len(sequence) - shared
        if not width or not trees or size + new > limit or 6 * width * shared < 8 * new * (size - shared):
            trees.append(Tree())
        trees[-1].add(member, sequence)
    return sorted(trees, key=lambda tree: -len(tree.tokens))


def flat_paths(trees: Sequence[Tree]) -> list[list[int]]:
    """Of each sequence, where its tokens are among those of the trees' rows, padded and counted row after row."""
    length = max(len(tree.tokens) for tree in trees)
    return [[row * length + node for node in path] for row, tree in enumerate(trees) for path in tree.paths]


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
    members = (member for tree in trees for member in tree.members)
    for member, path in zip(members, flat_paths(trees), strict=True):
        ids, start = samples[member].ids, samples[member].answer_start
        predicting += path[start - 1 : len(ids) - 1]
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
    """Samples in their order as the rows of one forward pass; ``group`` consecutive ones share a row as a tree."""
    trees = []
    for first in range(0, len(samples), group):
        trees.append(Tree())
        for member in sorted(range(first, min(first + group, len(samples))), key=lambda i: samples[i].ids):
            trees[-1].add(member, samples[member].ids)
    return to_batch(trees, samples, torch.device(device), masked=group > 1)
