"""Sequences with common openings as trees: one run of tokens for each opening, and what a model says at each node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

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
        path = [*(self.paths[-1][:shared] if shared else []), *range(start, start + new)]
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

    def padded(rows: Iterable[list[int]]) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)

    tokens, ends = padded(tree.tokens for tree in trees), padded(tree.ends for tree in trees)
    index = torch.arange(tokens.shape[1], device=device)
    ends = ends.maximum(index + 1)  # padding sees itself alone: no row of the mask is empty
    sees = (index[:, None] >= index) & (index[:, None] < ends[:, None, :])
    return Layout(tokens, padded(tree.depths for tree in trees), sees)


def places(trees: Sequence[Tree]) -> list[list[int]]:
    """Of each sequence, the places of its tokens in the batch of :func:`lay_out`, counted row after row."""
    length = max(len(tree.tokens) for tree in trees)
    return [[row * length + node for node in path] for row, tree in enumerate(trees) for path in tree.paths]


class TokenScores(NamedTuple):
    """Of each token of a continuation: its log-probability (nats), whether greedy decoding chooses it there, and mean
    and standard deviation of the log-probability of a token drawn from the model there (the mu and sigma of Min-K%++;
    empty unless asked for)."""

    log_probs: list[float]
    greedy: list[bool]
    means: Sequence[float] = ()
    stds: Sequence[float] = ()


def read(
    logits: torch.Tensor, rows: Sequence[list[int]], targets: Sequence[list[int]], moments: bool = False
) -> tuple[list[TokenScores], list[int]]:
    """Scores of continuations, in float32 or better, and the likeliest token of each row of logits.

    Args:
        logits: (n, vocabulary); a few rows at a time are taken.
        rows, targets: of each continuation, its tokens' rows of logits and the tokens; continuations may share rows.
        moments: whether to compute means and standard deviations.
    """
    totals, best, spread = [], [], []
    for part in logits.split(_LOGIT_ROWS):
        part = part if part.dtype == torch.float64 else part.float()
        best.append(part.argmax(-1))
        totals.append(part.logsumexp(-1))
        if moments:
            part = (part - totals[-1][:, None]).clamp(min=-1e4)  # 0 x log 0 is 0
            p = part.exp()
            mean = (p * part).sum(-1, keepdim=True)
            deviation = (p * (part - mean).square()).sum(-1).sqrt()
            spread.append(torch.stack([mean[:, 0], deviation]))
    total, likeliest = torch.cat(totals), torch.cat(best).tolist()
    at, tokens = (torch.tensor(list(chain(*lists)), device=logits.device) for lists in (rows, targets))
    log_probs = iter((logits[at, tokens].to(total.dtype) - total[at]).tolist())
    both = torch.cat(spread, 1).tolist() if moments else []
    scores = []
    for own, answer in zip(rows, targets, strict=True):
        greedy = [likeliest[row] == token for row, token in zip(own, answer, strict=True)]
        scores.append(TokenScores(list(islice(log_probs, len(own))), greedy, *([v[row] for row in own] for v in both)))
    return scores, likeliest
