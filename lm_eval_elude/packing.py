"""Sequences with common openings as trees: one run of tokens for each opening, and what a model says at each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_LOGIT_ROWS = 256  # positions whose float32 log-probabilities exist at one time


class Tree:
    """Sequences of tokens with their common prefixes merged, the nodes in depth-first order.

    Attributes:
        tokens, depths, ends: of each node; a node's descendants are those after it and before its end.
        paths: of each sequence, the nodes of its tokens.
        members: the caller's number of each sequence.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.ends: list[int] = []
        self.paths: list[list[int]] = []
        self.members: list[int] = []

    def add(self, member: int, sequence: list[int], shared: int) -> None:
        """Append a sequence, in order not before the last one, whose first ``shared`` tokens are the last one's."""
        start, new = len(self.tokens), len(sequence) - shared
        path = (self.paths[-1][:shared] if self.paths else []) + list(range(start, start + new))
        self.tokens += sequence[shared:]
        self.depths += range(shared, len(sequence))
        self.ends += [0] * new
        for node in path:
            self.ends[node] = start + new
        self.paths.append(path)
        self.members.append(member)


def plant(sequences: Sequence[list[int]], width: int, limit: int) -> list[Tree]:
    """Sort sequences into trees, the longest tree first.

    A sequence joins the tree before it where that saves work: in each layer a token costs about 24 width^2 operations
    and a pair of tokens of one row 4 width, and the pairs across branches are for nothing. They count four times here:
    attention under a mask is slower than a matrix product, and what joins later pays for a longer row too.

    Args:
        sequences: token ids, none empty.
        width: of the model's hidden states; 0 gives every sequence a tree of its own.
        limit: most tokens of a tree of several sequences.
    """
    trees: list[Tree] = []
    last: list[int] = []
    for member in sorted(range(len(sequences)), key=sequences.__getitem__):
        sequence = sequences[member]
        common = min(len(last), len(sequence))
        shared = next((i for i in range(common) if last[i] != sequence[i]), common)
        size, new = len(trees[-1].tokens) if trees else 0, len(sequence) - shared
        if not width or not trees or size + new > limit or 6 * width * shared < 8 * new * (size - shared):
            trees.append(Tree())
            shared = 0
        trees[-1].add(member, sequence, shared)
        last = sequence
    return sorted(trees, key=lambda tree: -len(tree.tokens))


class Layout(NamedTuple):
    """Trees as the rows of a batch; padding is on the right.

    Attributes:
        tokens, depths: (trees, length) token ids and positions.
        sees: (trees, length, length), whether a query (second axis) sees a key: itself and its ancestors.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    sees: torch.Tensor


def lay_out(trees: Sequence[Tree], device: torch.device) -> Layout:
    """Write trees into the tensors of one forward pass."""
    shape = (len(trees), max(len(tree.tokens) for tree in trees))
    tokens, depths = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    index = torch.arange(shape[1])
    ends = (index + 1).repeat(shape[0], 1)  # padding sees itself alone: no row of the mask is empty
    for row, tree in enumerate(trees):
        size = len(tree.tokens)
        tokens[row, :size] = torch.tensor(tree.tokens)
        depths[row, :size] = torch.tensor(tree.depths)
        ends[row, :size] = torch.tensor(tree.ends)
    index, ends = index.to(device), ends.to(device)
    sees = (index[:, None] >= index) & (index[:, None] < ends[:, None, :])
    return Layout(tokens.to(device), depths.to(device), sees)


class Told(NamedTuple):
    """What logits say.

    Attributes:
        log_probs: of each target token (nats).
        best: the likeliest token of each row of logits.
        moments: of each row, mean and standard deviation of the log-probability of a token drawn from it (the mu and
            sigma of Min-K%++); empty unless asked for.
    """

    log_probs: list[float]
    best: list[int]
    moments: list[tuple[float, float]]


def read(logits: torch.Tensor, rows: Sequence[int], targets: Sequence[int], moments: bool = False) -> Told:
    """Log-probabilities of targets, in float32 or better, a few rows at a time.

    Args:
        logits: (n, vocabulary).
        rows, targets: for each of m targets, its row of logits and its token; targets may share a row.
        moments: whether to compute them.
    """
    at, tokens = torch.tensor(rows, device=logits.device), torch.tensor(targets, device=logits.device)
    log_probs = torch.empty(len(rows), dtype=torch.float64, device=logits.device)
    best, spread = [], []
    for start in range(0, len(logits), _LOGIT_ROWS):
        part = logits[start : start + _LOGIT_ROWS]
        part = part if part.dtype == torch.float64 else part.float()
        best.append(part.argmax(-1))
        total = part.logsumexp(-1, keepdim=True)
        own = ((at >= start) & (at < start + _LOGIT_ROWS)).nonzero()[:, 0]
        place = at[own] - start
        log_probs[own] = (part[place, tokens[own]] - total[place, 0]).double()
        if moments:
            part = (part - total).clamp(min=-1e4)  # 0 x log 0 is 0
            p = part.exp()
            mean = (p * part).sum(-1, keepdim=True)
            deviation = (p * (part - mean).square()).sum(-1, keepdim=True).sqrt()
            spread.append(torch.cat([mean, deviation], 1))
    pairs = [(float(mean), float(deviation)) for mean, deviation in torch.cat(spread).tolist()] if spread else []
    return Told(log_probs.tolist(), torch.cat(best).tolist(), pairs)
