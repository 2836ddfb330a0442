"""Losses of stage 1: G tokens reconstruct the picture, keep their place, and relate to one another as U tokens do.

Over ranks, gradients and values of a loss add up to those of the whole batch: per-image terms are divided by the number
of images on all ranks, and the term that compares images is shared out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn.functional import adaptive_avg_pool2d, cosine_similarity, normalize

from gafu.config import AlignmentSettings
from gafu.lpips import LPIPS
from launch.errors import UserError

Grid = tuple[int, int]


def reconstruction_loss(
    predicted: torch.Tensor, image: torch.Tensor, lpips: LPIPS | None, settings: AlignmentSettings, total: int
) -> torch.Tensor:
    """L_rec = |Î − I| + l2·(Î − I)² + lpips·LPIPS(Î, I), pixel means, summed over images and divided by `total`.

    predicted, image [n, 3, H, W] in [-1, 1]; predicted is not clamped. UserError when LPIPS has weight but is missing.
    """
    difference = (predicted - image).flatten(1)
    loss = difference.abs().mean(1) + settings.l2 * difference.square().mean(1)
    if settings.lpips:
        if lpips is None:
            raise UserError("alignment.lpips: it has a weight but no LPIPS was loaded; load one, or set it to 0")
        loss = loss + settings.lpips * lpips(predicted, image)
    return loss.sum() / total


class BindHead(nn.Module):
    """W of L_spa: a G token → the latents of its cell."""

    def __init__(self, d_und: int, channels: int):
        super().__init__()
        self.project = nn.Linear(d_und, channels, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.project(tokens)


def binding_loss(
    head: BindHead, tokens: torch.Tensor, target: torch.Tensor, total: int, energy: torch.Tensor | None = None
) -> torch.Tensor:
    """L_spa = mean_i ‖W·G_i − z_i‖² over the cells of an image, summed over images and divided by `total`.

    tokens [n, T, d]; target [n, rows, columns, cb] with rows·columns = T; energy: `target_energy`, to divide by.
    """
    target = target.detach().flatten(1, 2)
    loss = (head(tokens) - target).square().sum(-1).mean(1).sum() / total
    return loss if energy is None else loss / energy


def target_energy(target: torch.Tensor) -> torch.Tensor:
    """Mean ‖z‖² over cells and images of all ranks, plus 1e-6: the scale of `binding_loss` where targets have none."""
    squares = target.detach().double().square().sum(-1)
    sums = torch.stack([squares.sum(), torch.tensor(float(squares.numel()), device=squares.device).double()])
    if _world() > 1:
        distributed.all_reduce(sums)
    return (sums[0] / sums[1]).to(target.dtype) + 1e-6


@dataclass(frozen=True)
class Relation:
    """L_rel of a rank (its share), and how many images all ranks compared."""

    loss: torch.Tensor
    images: int


def relation_loss(
    tokens: torch.Tensor, g_grid: Grid, understanding: torch.Tensor, u_grid: Grid, scales: Sequence[int] = (4, 8, 16)
) -> Relation:
    """L_rel: mean over scales of 1 − cos(r(G), sg r(U)), and the same among images as one more term.

    r: pairwise cosines of an image's tokens pooled to s×s, each pair once, less their mean. The term among images takes
    the mean token of every image on all ranks; below 3 images it has no shape to compare and the scales alone count.
    tokens [n, T, d]; understanding [n, Nu, d'], no gradient. Collective; ranks may hold different numbers of images.
    """
    images = _count(len(tokens), tokens.device)
    understanding = understanding.detach().to(tokens.dtype)
    terms = len(scales) + (images >= 3)
    loss = tokens.sum() * 0
    for side in scales:
        ours, theirs = _relations(_pool(tokens, g_grid, side)), _relations(_pool(understanding, u_grid, side))
        loss = loss + (1 - _cosine(ours, theirs)).sum() / images / terms
    if images >= 3:
        ours, theirs = _gather(tokens.mean(1)), _gather(understanding.mean(1))
        among = 1 - _cosine(_relations(ours[None]), _relations(theirs[None]))[0]
        # Each rank has the whole term with the gradient of its own images: share out the value, keep the gradient.
        loss = loss + (among + among.detach() * (1 / _world() - 1)) / terms
    return Relation(loss, images)


def _pool(tokens: torch.Tensor, grid: Grid, side: int) -> torch.Tensor:
    """[n, rows·columns, d] → [n, side², d]."""
    planes = tokens.transpose(1, 2).unflatten(2, grid)
    return adaptive_avg_pool2d(planes, side).flatten(2).transpose(1, 2)


def _relations(nodes: torch.Tensor) -> torch.Tensor:
    """Nodes [n, m, d] → centred cosines of the m(m − 1)/2 pairs [n, pairs]."""
    unit = normalize(nodes, dim=-1, eps=1e-6)
    above = torch.ones(nodes.shape[1], nodes.shape[1], dtype=torch.bool, device=nodes.device).triu(1)
    pairs = (unit @ unit.transpose(1, 2))[:, above]
    return pairs - pairs.mean(1, keepdim=True)


def _cosine(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return cosine_similarity(ours, theirs, dim=-1, eps=1e-8)


def _world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _count(n: int, device: torch.device) -> int:
    count = torch.tensor(n, device=device)
    if _world() > 1:
        distributed.all_reduce(count)
    return int(count)


def _gather(nodes: torch.Tensor) -> torch.Tensor:
    """Nodes [n, d] of all ranks in rank order [N, d]; gradient to this rank's own."""
    if _world() == 1:
        return nodes
    counts = [torch.zeros((), dtype=torch.long, device=nodes.device) for _ in range(_world())]
    distributed.all_gather(counts, torch.tensor(len(nodes), device=nodes.device))
    longest = int(max(counts))
    padded = torch.cat([nodes.detach(), nodes.new_zeros(longest - len(nodes), nodes.shape[1])])
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded)
    parts = [part[: int(count)] for part, count in zip(parts, counts, strict=True)]
    parts[distributed.get_rank()] = nodes
    return torch.cat(parts)
