"""Stage 1's two terms: cross-entropy of the text, and the distance between latent states and visual embeddings.

Loss = CE + 0.1 · MSE (paper, stage 1). Both are sums divided by counts of the global batch, as in `grpo`.
"""

import torch

from realvr.objectives.evidence import wide


def text_ce(logprobs: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Cross-entropy: −Σ log-probability of the supervised tokens / tokens. A scalar.

    logprobs: [..., T] of the labels; mask: [..., T], True at supervised labels: text, start and end, not the latent
    ids and not the prompt. tokens: number of supervised labels in the global batch. What is masked is never read.
    """
    return -logprobs.masked_fill(~mask.bool(), 0.0).sum() / max(tokens, 1)


def latent_mse(hidden: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, elements: int) -> torch.Tensor:
    """Mean squared distance between the state that predicts a latent and the visual embedding it stands for.

    hidden: [B, T, d], last decoder states after the final norm. mask: [B, T], True at `<|lvr|>` positions; the state
    compared with position t is that at t − 1. target: [M, d], visual embeddings of the masked positions in row-major
    order; no gradient enters. elements: M·d of the global batch. Computed in float32 (float64 stays). A scalar.
    Raises ValueError if a latent is a row's first token or M does not fit the mask.
    """
    mask = mask.bool()
    if bool(mask[:, 0].any()):
        raise ValueError("a latent at position 0 has no state before it")
    states = hidden[:, :-1][mask[:, 1:]]
    if states.shape != target.shape:
        raise ValueError(f"{tuple(states.shape)} latent states but {tuple(target.shape)} target embeddings")
    return (wide(states) - wide(target.detach())).square().sum() / max(elements, 1)
