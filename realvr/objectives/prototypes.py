"""Prototypes: what a region of an image looks like to the language model, and the other images' to be told apart from.

Source: paper, stage 2, step 2 of the evidence loss. Prototypes never carry gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch

from launch.errors import UserError
from realvr.objectives.evidence import wide


def union(boxes: Sequence[Sequence[int]], tokens: int) -> list[int]:
    """Token indices of all boxes, each once, in box order (first box first, its tokens as given: raster order).

    boxes: one list of token indices a box, relative to the features; none (or only empty ones) means the whole image,
    0 … tokens − 1. An index outside raises ValueError.
    """
    indices = list(dict.fromkeys(int(i) for box in boxes for i in box)) or list(range(tokens))
    if not indices or min(indices) < 0 or max(indices) >= tokens:
        raise ValueError(f"region tokens {indices[:8]}… outside 0…{tokens - 1}")
    return indices


def positive(features: torch.Tensor, boxes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Mean of the region's visual tokens: features [N, d] (merger outputs as inserted into the text) → [d].

    The region is the union of the boxes, a token in two of them counted once; the whole image without boxes. Float32
    (float64 stays), detached.
    """
    indices = torch.tensor(union(boxes, features.shape[0]), device=features.device)
    return wide(features.detach()[indices]).mean(0)


def spread(n: int, k: int) -> list[int]:
    """k indices into n things, evenly spaced, in order: ⌊(2j + 1)·n / 2k⌋. Identity for n = k; repeats for n < k."""
    return [(2 * j + 1) * n // (2 * k) for j in range(k)]


def per_slot(features: torch.Tensor, boxes: Sequence[Sequence[int]], k: int) -> torch.Tensor:
    """One prototype a latent: features [N, d] → [k, d], the region's tokens in stage 1's order, resampled by `spread`.

    Stage 1 writes box after box, each in raster order; so the j-th latent keeps the place it was taught. Float32
    (float64 stays), detached.
    """
    indices = union(boxes, features.shape[0])
    chosen = torch.tensor([indices[i] for i in spread(len(indices), k)], device=features.device)
    return wide(features.detach()[chosen])


class PrototypeBank:
    """Prototypes of the current global batch and of earlier steps, one an image key.

    Every rank holds the same bank and is given the same global batch in the same order, so all choose alike. It lives
    on the CPU and holds shared prototypes (`positive`), whichever kind p⁺ is.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity  # of earlier steps; the current batch stays besides
        self._current: dict[str, torch.Tensor] = {}
        self._earlier: dict[str, torch.Tensor] = {}  # newest first

    def __len__(self) -> int:
        return len(self._current.keys() | self._earlier.keys())

    def update(self, keys: Sequence[str], prototypes: torch.Tensor) -> None:
        """Begin a step: keys [M] (`Example.key`) and prototypes [M, d] of the global batch, in global order.

        The former batch joins the earlier ones. Of equal keys in a batch the first counts.
        """
        if len(keys) != prototypes.shape[0]:
            raise ValueError(f"{len(keys)} keys for {prototypes.shape[0]} prototypes")
        earlier = self._current | {k: v for k, v in self._earlier.items() if k not in self._current}
        self._earlier = dict(list(earlier.items())[: self.capacity])
        self._current = {}
        for key, prototype in zip(keys, wide(prototypes.detach()).cpu().unbind(0), strict=True):
            self._current.setdefault(key, prototype.clone())

    def select(self, key: str, n: int) -> torch.Tensor:
        """Up to n prototypes [n', d] of other keys: this batch's first, then earlier ones, newest first.

        Each key once, never `key` itself. In the batch the choice begins after `key`'s own place and goes round, so
        that different examples meet different negatives. n = 0 gives none; n > 0 and nothing to choose is a UserError:
        without negatives this loss would train on nothing and say so nowhere.
        """
        names = list(self._current)
        start = names.index(key) + 1 if key in self._current else 0
        chosen = [self._current[k] for k in (names[start:] + names[:start]) if k != key]
        chosen += [v for k, v in self._earlier.items() if k != key and k not in self._current]
        if not chosen and n > 0:
            raise UserError(
                f"evidence.negatives is {n} but no other image than {key!r} has been seen (batch of {len(names)}, "
                f"{len(self._earlier)} from earlier steps): the data has one picture or all its negative keys are "
                f"equal; add pictures, mend negative_key, raise rollout.prompts_per_step, or set evidence.negatives: 0"
            )
        width = next(iter(self._current.values())).shape[-1] if self._current else 0
        return torch.stack(chosen[:n]) if chosen[:n] else torch.zeros(0, width)

    def negatives(self, keys: Sequence[str], n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`select` for several rows: negatives [B, n, d] (0 where missing), mask [B, n]."""
        rows = [self.select(key, n) for key in keys]
        width = max((row.shape[-1] for row in rows), default=0)
        table = torch.zeros(len(rows), n, width, dtype=rows[0].dtype if rows else torch.float32)
        mask = torch.zeros(len(rows), n, dtype=torch.bool)
        for i, row in enumerate(rows):
            table[i, : row.shape[0]] = row
            mask[i, : row.shape[0]] = True
        return table, mask

    def state_dict(self) -> dict[str, Any]:
        """Keys and prototypes of the current batch and the earlier ones, for a checkpoint."""
        return {
            name: {"keys": list(part), "prototypes": torch.stack(list(part.values())) if part else None}
            for name, part in (("current", self._current), ("earlier", self._earlier))
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name in ("current", "earlier"):
            keys, prototypes = state[name]["keys"], state[name]["prototypes"]
            restored = dict(zip(keys, prototypes.unbind(0), strict=True)) if keys else {}
            setattr(self, f"_{name}", restored)
