"""Statistics of a step as sums, so that they add up over micro-batches and ranks before anything is divided."""

from collections.abc import Iterable
from typing import Any

import torch

Sums = dict[str, torch.Tensor]
"""By name, float64: [2] (sum, number) for a mean; [] for a maximum or plain sum whose name ends in `_max` or `_sum`."""


def mean_of(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """(sum, number) of values [...] where mask [...] is True (None: everywhere)."""
    values = values.detach().double()
    if mask is None:
        return torch.stack([values.sum(), values.new_tensor(values.numel())])
    return torch.stack([values.masked_fill(~mask, 0.0).sum(), mask.sum().double()])


def ratio(total: torch.Tensor, number: torch.Tensor | int) -> torch.Tensor:
    """(sum, number) from a sum that is there already."""
    total = total.detach().double()
    return torch.stack([total, torch.as_tensor(number, dtype=torch.float64, device=total.device)])


def _scalar(name: str) -> bool:
    return name.endswith(("_max", "_sum"))


def combine(parts: Iterable[Sums]) -> Sums:
    """Add up sums and take maxima over micro-batches; all parts have the same names."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value.clone()
            elif name.endswith("_max"):
                total[name] = torch.maximum(total[name], value)
            else:
                total[name] = total[name] + value
    return total


def all_reduce(sums: Sums, group: torch.distributed.ProcessGroup | None = None) -> Sums:
    """The same over all ranks (two collectives; every rank must hold the same names)."""
    result: Sums = {}
    for operation, names in _by_operation(sums).items():
        flat = torch.cat([sums[n].reshape(-1) for n in names])
        torch.distributed.all_reduce(flat, op=operation, group=group)
        parts = flat.split([sums[n].numel() for n in names])
        result |= {n: part.reshape(sums[n].shape) for n, part in zip(names, parts, strict=True)}
    return result


def _by_operation(sums: Sums) -> dict[Any, list[str]]:
    names = {torch.distributed.ReduceOp.SUM: [], torch.distributed.ReduceOp.MAX: []}
    for name in sorted(sums):
        names[torch.distributed.ReduceOp.MAX if name.endswith("_max") else torch.distributed.ReduceOp.SUM].append(name)
    return {operation: found for operation, found in names.items() if found}


def values(sums: Sums) -> dict[str, float]:
    """Plain numbers; a mean over nothing is left out (it would say 0 where there was nothing to see)."""
    numbers = {n: v.tolist() for n, v in sums.items()}
    return {n: v if _scalar(n) else v[0] / v[1] for n, v in numbers.items() if _scalar(n) or v[1]}
