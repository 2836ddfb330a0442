"""Routing: how much of the evidence loss each latent takes. Every choice is one small function of one signature.

Source: paper, stage 2 (contrast; raw, uniform and pure as ablations); `causal` is this project's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from realvr.config import EvidenceSettings
from realvr.objectives.evidence import wide


@dataclass(frozen=True)
class Credit:
    """What is known about the latents' part in the answers; a routing reads what it needs.

    right: [B, K], readout of the right answer (post-softmax attention from its content tokens to each latent, averaged
    over layers, heads and tokens). wrong: [B, W, K], readout of the distinct wrong answers; wrong_mask: [B, W], True
    where there is one. drops: [B, K], log-probability of the right answer minus the same with one latent replaced.
    Fields that no chosen routing reads may be None.
    """

    right: torch.Tensor | None = None
    wrong: torch.Tensor | None = None
    wrong_mask: torch.Tensor | None = None
    drops: torch.Tensor | None = None


def contrast(credit: Credit, like: torch.Tensor) -> torch.Tensor:
    """γ = [r(y*) − mean over the distinct wrong answers of r(y⁻)]₊, [B, K]; 0 in rows without a wrong answer."""
    if credit.wrong.shape[1] == 0:
        return torch.zeros_like(like)
    present = credit.wrong_mask.bool()[..., None]
    number = present.sum(1)  # [B, 1]
    mean = credit.wrong.masked_fill(~present, 0.0).sum(1) / number.clamp(min=1)
    return torch.relu(credit.right - mean).masked_fill(number == 0, 0.0)


def raw(credit: Credit, like: torch.Tensor) -> torch.Tensor:
    """γ = r(y*), [B, K]."""
    return credit.right


def uniform(credit: Credit, like: torch.Tensor) -> torch.Tensor:
    """γ = 0: no latent is preferred, [B, K]; `weights` takes η = 1 with it."""
    return torch.zeros_like(like)


def causal(credit: Credit, like: torch.Tensor) -> torch.Tensor:
    """γ = how far the right answer's log-probability falls when the latent is replaced; rises count as 0. [B, K]."""
    return torch.relu(credit.drops)


ROUTINGS: dict[str, Callable[[Credit, torch.Tensor], torch.Tensor]] = {
    "contrast": contrast,
    "raw": raw,
    "uniform": uniform,
    "causal": causal,
}


def scale_to_one(x: torch.Tensor) -> torch.Tensor:
    """Rows of non-negative x [B, K] scaled to sum to 1; a row of zeros stays."""
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, x / total.masked_fill(total <= 0, 1.0), x)


def gamma(credit: Credit, settings: EvidenceSettings, like: torch.Tensor) -> torch.Tensor:
    """γ [B, K] of the chosen routing, at least float32; scaled to sum to 1 and detached as the settings say."""
    value = wide(ROUTINGS[settings.routing](credit, like))
    if settings.normalise_gamma:
        value = scale_to_one(value)
    return value.detach() if settings.detach_weights else value


def weights(credit: Credit, settings: EvidenceSettings, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w = η/K + (1 − η)·γ, [B, K]; `uniform` is η = 1; `mass_matched` scales each row to sum to 1.

    like: the gaps [B, K], which give shape, device and type. Returns (w, γ); γ is for the log.
    """
    value = gamma(credit, settings, like.detach())
    floor = 1.0 if settings.routing == "uniform" else settings.floor
    mixed = floor / like.shape[-1] + (1 - floor) * value
    return (scale_to_one(mixed) if settings.mass_matched else mixed), value
