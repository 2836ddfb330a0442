"""The tree's keys and values as plain data: frozen chunks of the past, and slots that are written once.

A view travels through an unmodified transformers model as a keyword argument down to the attention function
(`attention.py`). Unlike a cache object it is never changed in place, so a checkpointed layer that is computed again in
the backward pass finds what it found the first time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Chunk = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of some tokens of one layer: each [B, kv heads, T, head size], rotary positions applied."""


@dataclass(frozen=True)
class Segment:
    """Query rows of one kind: `branches` branches of `length` tokens each, laid out one after the other.

    A token sees the past chunks, and in its own branch what stands before it. keep: leave the segment's keys and values
    in the view. gradient_squares: a one-element tensor that gathers the squared norm of the gradient that this segment
    sends into the trunk's keys and values.
    """

    branches: int
    length: int
    keep: bool = False
    gradient_squares: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.branches * self.length


@dataclass(frozen=True)
class Readout:
    """Which attention is measured: from `rows` (bool [B, branches, length]) to the latents.

    The latents are the past columns after the trunk and `<|lvr_start|>`, then the first `own` tokens of each branch.
    """

    rows: torch.Tensor
    own: int


@dataclass(frozen=True)
class Plan:
    """What one forward computes. starts: first real trunk column of each row (the trunk is left-padded).

    trunk: number of trunk columns at the head of this forward; 0 when the trunk is in the past. dense: attention by one
    dense mask instead of parts merged by log-sum-exp (the fall-back, equal in result).
    """

    starts: tuple[int, ...]
    trunk: int
    segments: tuple[Segment, ...]
    readout: Readout | None = None
    dense: bool = False

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Neighbouring rows of equal start as (first row, row after the last, start): each is one kernel call."""
        bounds = [i for i, s in enumerate(self.starts) if i == 0 or s != self.starts[i - 1]]
        return tuple((a, b, self.starts[a]) for a, b in zip(bounds, [*bounds[1:], len(self.starts)], strict=True))


@dataclass
class KVView:
    """What one forward sees (`past`, by layer) and leaves behind (`new`, `readouts`, by layer; written once)."""

    plan: Plan
    past: Sequence[tuple[Chunk, ...]]
    new: list[tuple[Chunk, ...] | None] = field(init=False)
    readouts: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.new = [None] * len(self.past)
        self.readouts = [None] * len(self.past)

    def write(self, layer: int, chunks: Sequence[Chunk]) -> None:
        """Keep a layer's chunks; a second write (a recomputed layer) changes nothing."""
        if self.new[layer] is None:
            self.new[layer] = tuple(chunks)

    def write_readout(self, layer: int, readout: torch.Tensor) -> None:
        """Keep a layer's readout [B, branches, K]."""
        if self.readouts[layer] is None:
            self.readouts[layer] = readout

    def readout(self) -> torch.Tensor:
        """Mean over layers: [B, branches, K]."""
        return torch.stack(self.readouts).mean(0)


def append(chunk: Chunk, more: Chunk) -> Chunk:
    """A chunk with more tokens after its own."""
    return torch.cat([chunk[0], more[0]], 2), torch.cat([chunk[1], more[1]], 2)


def detached(past: Sequence[tuple[Chunk, ...]]) -> list[tuple[Chunk, ...]]:
    """The same chunks without their history."""
    return [tuple((k.detach(), v.detach()) for k, v in chunks) for chunks in past]


def fold(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, H, N, …] → [B, kv heads, (H / kv heads)·N, …]: the query heads of a group become rows."""
    batch, heads, rows = x.shape[:3]
    return x.reshape(batch, kv_heads, heads // kv_heads * rows, *x.shape[3:])


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, kv heads, T, D] → [B, H, T, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
