"""The evidence loss: each latent should be nearer to the evidence's prototype than to any other image's.

Source: paper, stage 2. Prototypes are targets: no gradient enters them, whatever the caller passes.
"""

import torch
import torch.nn.functional as F


def wide(x: torch.Tensor) -> torch.Tensor:
    """float32, or float64 where it is float64 already: cosines and means of half-precision states are not trusted."""
    return x if x.dtype == torch.float64 else x.float()


def gaps(
    z: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor | None = None,
    negative_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """g_t = cos(z_t, p⁺) − max over negatives of cos(z_t, p⁻).

    z: [B, K, d], with gradient. positive: [B, d] (shared) or [B, K, d] (one a latent). negatives: [B, N, d];
    negative_mask: [B, N], True where a prototype stands (None: all). Returns [B, K], float32 (float64 stays).
    Without negatives (None, N = 0, or a row whose mask is all False) g = cos⁺ alone: that is the ablation
    `negatives: 0` and rows that carry no evidence; a training row that should have some is refused earlier, by
    `PrototypeBank.select`.
    """
    z = F.normalize(wide(z), dim=-1, eps=1e-8)
    positive = F.normalize(wide(positive.detach()), dim=-1, eps=1e-8).to(z.dtype)
    if positive.dim() == 2:
        positive = positive[:, None]
    closeness = (z * positive).sum(-1)
    if negatives is None or negatives.shape[1] == 0:
        return closeness
    negatives = F.normalize(wide(negatives.detach()), dim=-1, eps=1e-8).to(z.dtype)
    others = torch.einsum("bkd,bnd->bkn", z, negatives)
    if negative_mask is None:
        return closeness - others.amax(-1)
    present = negative_mask.bool()
    # −2 is below every cosine, and finite: a row without negatives must not turn the loss into a NaN.
    nearest = others.masked_fill(~present[:, None], -2.0).amax(-1)
    return closeness - nearest.masked_fill(~present.any(-1, keepdim=True), 0.0)


def hinge(gaps: torch.Tensor, weights: torch.Tensor, margin: float, mask: torch.Tensor | None = None) -> torch.Tensor:
    """ℓ = Σ_t w_t · [margin − g_t]₊ of each example, before λ and before the mean over the global batch.

    gaps, weights: [B, K] (weights as `routing.weights` gives them, with or without gradient); mask: [B], True where the
    row carries evidence. Returns [B], 0 where masked: the caller sums and divides by the global number of such rows.
    """
    losses = (weights.to(gaps.dtype) * torch.relu(margin - gaps)).sum(-1)
    return losses if mask is None else losses.masked_fill(~mask.bool(), 0.0)
