"""Log-probabilities of sampled tokens without ever holding all their logits."""

import torch
from torch import nn

CHUNK_ELEMENTS = 2**25  # logits held at a time (128 MB in float32)


def _logits(hidden, weight, states, bans, temperature) -> torch.Tensor:
    """[rows, V] in at least float32: divided by the temperature, banned ids at −inf."""
    logits = hidden @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.masked_fill_(bans[states], float("-inf"))


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward and backward go through the rows a chunk at a time; the backward computes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, states, bans, temperature, rows):
        logprobs, entropies = [], []
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            logits = _logits(hidden[part], weight, states[part], bans, temperature)
            total = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, targets[part, None])[:, 0] - total)
            share = (logits - total[:, None]).exp_()
            entropies.append(total - share.mul_(logits.nan_to_num_(neginf=0.0)).sum(-1))
        ctx.save_for_backward(hidden, weight, targets, states, bans)
        ctx.temperature, ctx.rows = temperature, rows
        logprobs, entropies = torch.cat(logprobs), torch.cat(entropies)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, states, bans = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for at in range(0, len(hidden), ctx.rows):
            part = slice(at, at + ctx.rows)
            slope = _logits(hidden[part], weight, states[part], bans, ctx.temperature).softmax(-1).neg_()
            slope.scatter_add_(-1, targets[part, None], torch.ones_like(slope[:, :1]))
            slope = slope.mul_(grad[part, None] / ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                grad_weight.addmm_(slope.t(), hidden[part])
        return grad_hidden, grad_weight, None, None, None, None, None


@torch.no_grad()
def _greedy(hidden, weight, states, bans, temperature, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Most probable token and its log-probability, [R] each."""
    best = [
        _logits(hidden[part], weight, states[part], bans, temperature).log_softmax(-1).max(-1)
        for part in (slice(at, at + rows) for at in range(0, len(hidden), rows))
    ]
    return torch.cat([b.indices for b in best]), torch.cat([b.values for b in best])


class VocabularyHead(nn.Module):
    """The language model's output layer, asked for log-probabilities instead of logits.

    It owns the checkpoint's `lm_head.weight` and uses it only inside its own forward, so that ZeRO-3 gathers the weight
    once a call, however many chunks there are.
    """

    def __init__(self, lm_head: nn.Linear, chunk_elements: int = CHUNK_ELEMENTS):
        super().__init__()
        if lm_head.bias is not None:
            raise ValueError("an output layer with a bias is not supported")
        self.weight = lm_head.weight
        self.vocabulary = lm_head.out_features
        self.chunk_elements = chunk_elements

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None,
        states: torch.Tensor,
        bans: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of `targets` and entropy of the distribution, both [R], at least float32.

        hidden [R, d] (R ≥ 1), targets and states int64 [R], bans bool [S, V]: the row of a token's state says what it
        may not be. No gradient flows through the entropy. Without targets: the most probable tokens and their
        log-probability, without gradient.
        """
        rows = max(1, self.chunk_elements // self.vocabulary)
        if targets is None:
            return _greedy(hidden, self.weight, states, bans, temperature, rows)
        return _ChunkedLogProbs.apply(hidden, self.weight, targets, states, bans, temperature, rows)
