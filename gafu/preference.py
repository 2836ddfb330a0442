"""Stage 2's objective: answers by the matched G, preferred over answers by another image's G, close to the original.

Over ranks, values and gradients add up to those of the whole batch: each loss is a sum over a rank's samples divided by
a count over all ranks. Samples are numbered in the batch of all ranks, so that schedules and draws do not depend on how
a batch is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy, log_softmax, softplus

from gafu.config import PreferenceSettings
from launch.errors import UserError

Part = Literal["plain", "positive", "negative"]


def donors(n: int) -> torch.Tensor:
    """π(i) = (i + ⌊n/2⌋) mod n: whose G each sample gets in the shuffled branch, Long [n]. UserError below 2."""
    if n < 2:
        raise UserError(
            f"stage 2: {n} sample(s) with an image in the batch, and the shuffled branch wants at least 2; raise the "
            "batch size, leave out text-only rows, or set preference.dpo to 0 and preference.kl_knots to []"
        )
    return (torch.arange(n) + n // 2) % n


def donor_differs(images: Sequence[str | int], donor: torch.Tensor) -> torch.Tensor:
    """Which pairs count, bool [n]: a donor that shows the same image is no wrong G. images: a name for each sample."""
    return torch.tensor([images[i] != images[j] for i, j in enumerate(donor.tolist())], dtype=torch.bool)


def answer_ce(
    logits: torch.Tensor,
    targets: torch.Tensor,
    sample: torch.Tensor,
    n: int,
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """ℓ [n]: cross-entropy of each sample's answer, mean or sum over its tokens.

    logits [A, V] predict targets [A] of samples sample [A]. UserError when a sample has no answer token.
    """
    counts = torch.bincount(sample, minlength=n)
    if bool((counts == 0).any()):
        empty = int((counts == 0).nonzero()[0])
        raise UserError(f"sample {empty} of the batch has no answer token; give it an answer, or leave it out")
    losses = cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, targets, reduction="none")
    sums = torch.zeros(n, dtype=losses.dtype, device=losses.device).index_add(0, sample, losses)
    return sums / counts if reduction == "mean" else sums


@dataclass(frozen=True)
class Preference:
    """DPO's value, and two losses whose gradients are its parts through the matched and the shuffled branch."""

    value: torch.Tensor
    positive: torch.Tensor
    negative: torch.Tensor


def preference(
    matched: torch.Tensor, shuffled: torch.Tensor, counts: torch.Tensor, beta: float, total: int
) -> Preference:
    """softplus(−β(ℓ⁻ − ℓ⁺)) summed over pairs that count and divided by `total`, their number on all ranks.

    matched ℓ⁺, shuffled ℓ⁻ [n]; counts bool [n]. Without a pair that counts everything is 0, with a graph.
    """
    # Linear in ℓ with the sigmoid held fixed: each has exactly its part of the gradient and no graph of the other.
    slope = beta * torch.sigmoid(-beta * (shuffled - matched)).detach() * counts / max(total, 1)
    value = (softplus(-beta * (shuffled - matched)) * counts).sum().detach() / max(total, 1)
    return Preference(value, (slope * matched).sum(), -(slope * shuffled).sum())


def forward_kl(
    reference: torch.Tensor, shuffled: torch.Tensor, counts: torch.Tensor, sample: torch.Tensor, total: int
) -> torch.Tensor:
    """Σ_v p_ref (log p_ref − log p_shuf) over answer tokens of samples that count, divided by `total` such tokens.

    reference, shuffled: logits [A, V], gradient to shuffled only; counts bool [n]; sample Long [A].
    """
    wide = torch.float32 if shuffled.dtype == torch.bfloat16 else shuffled.dtype
    ref = log_softmax(reference.detach().to(wide), -1)
    tokens = (ref.exp() * (ref - log_softmax(shuffled.to(wide), -1))).sum(-1)
    return (tokens * counts[sample]).sum() / max(total, 1)


def at_knots(step: int, knots: Sequence[tuple[int, float]]) -> float:
    """λ_KL: the line through (step, weight) knots, level outside of them; without knots 0."""
    if not knots:
        return 0.0
    steps, weights = zip(*knots, strict=True)
    return float(np.interp(step, steps, weights))


def mask_probability(step: int, settings: PreferenceSettings) -> float:
    """Probability that U is masked at `step` (0 is the first): a level a phase, the last one stays."""
    phase = min(step // settings.mask_phase, len(settings.mask_probabilities) - 1)
    return settings.mask_probabilities[phase]


def draw_mask(seed: int, step: int, samples: Sequence[int], probability: float) -> torch.Tensor:
    """Which samples lose their U, bool [n]: a draw for each (seed, step, number of the sample), alike on any rank."""
    draws = [np.random.default_rng([seed, step, sample]).random() for sample in samples]
    return torch.tensor([draw < probability for draw in draws], dtype=torch.bool)


def mask_understanding(understanding: torch.Tensor, masked: torch.Tensor, null: torch.Tensor) -> torch.Tensor:
    """U [n, Nu, d] with the null embedding [d] in place of every token of the masked [n] samples.

    Branches that share its result are one graph: differentiate them with `again`, or call it once a branch.
    """
    return torch.where(masked[:, None, None].to(understanding.device), null.to(understanding.dtype), understanding)


@dataclass(frozen=True)
class GradientStats:
    """Norms of the parts after weighting, before the cap; the factor the cap put on the negative part; the result."""

    plain: float
    positive: float
    negative: float
    factor: float
    total: float


class SplitGradients:
    """A step's gradient in three parts, summed over micro-steps and ranks, then weighted, capped and put together.

    The trained part is small and whole on every rank: it is reduced here, by hand, because the cap needs the norms of
    two parts that a sharded optimizer would have added up.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        if not self.parameters:
            raise UserError("stage 2: nothing trains; set injection.kind or injection.lora")
        self._flat: dict[Part, torch.Tensor] = {}

    def add(self, part: Part, loss: torch.Tensor, again: bool = False) -> None:
        """Add the gradient of a scalar `loss` to a part. again: the same graph will be differentiated once more."""
        gradients = torch.autograd.grad(loss, self.parameters, retain_graph=again, allow_unused=True)
        wide = torch.promote_types(torch.float32, self.parameters[0].dtype)
        pieces = [
            (torch.zeros_like(p) if g is None else g).to(wide).flatten()
            for p, g in zip(self.parameters, gradients, strict=True)
        ]
        flat = torch.cat(pieces)
        self._flat[part] = self._flat[part].add_(flat) if part in self._flat else flat

    def finish(self, settings: PreferenceSettings) -> GradientStats:
        """Reduce, weight, cap; leave the sum in `.grad` of the parameters and forget the parts.

        Call once an optimizer step, with the same parts on every rank. positive and negative are weighted 4 : 1, then
        the negative is shrunk to at most `cap` of the positive's norm; the plain part (CE, KL) is left alone.
        """
        parts = {part: self._flat.get(part) for part in ("plain", "positive", "negative")}
        self._flat = {}
        for flat in parts.values():
            if flat is not None and distributed.is_initialized() and distributed.get_world_size() > 1:
                distributed.all_reduce(flat)
        weights = {"plain": 1.0, "positive": settings.positive, "negative": settings.negative}
        norms = {part: 0.0 if flat is None else weights[part] * float(flat.norm()) for part, flat in parts.items()}
        factor = 1.0
        if settings.cap is not None and norms["negative"] > settings.cap * norms["positive"]:
            factor = settings.cap * norms["positive"] / norms["negative"]
        weights["negative"] *= factor
        whole = [weights[part] * flat for part, flat in parts.items() if flat is not None]
        if not whole:
            raise RuntimeError("finish() without an add()")
        total = torch.stack(whole).sum(0)
        at = 0
        for parameter in self.parameters:
            piece = total[at : at + parameter.numel()]
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)
            at += parameter.numel()
        return GradientStats(norms["plain"], norms["positive"], norms["negative"], factor, float(total.norm()))
