"""Log-probabilities in chunks."""

import pytest
import torch
from torch import nn

from realvr.policy.logprobs import VocabularyHead


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_chunks_equal_the_whole(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 20, bias=False, dtype=torch.float64)
    hidden = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    targets, states = torch.randint(0, 10, (7,)), torch.randint(0, 3, (7,))
    bans = torch.zeros(3, 20, dtype=torch.bool)
    bans[0, 12:], bans[1, 15] = True, True
    head = VocabularyHead(linear, chunk_elements=rows * 20)
    logprobs, entropy = head(hidden, targets, states, bans, 0.7)

    logits = (linear(hidden) / 0.7).masked_fill(bans[states], float("-inf"))
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, expected.gather(-1, targets[:, None])[:, 0])
    shares = torch.distributions.Categorical(logits=logits.detach())
    torch.testing.assert_close(entropy, shares.entropy())
    assert not entropy.requires_grad

    grad = torch.randn(7, dtype=torch.float64)
    ours = torch.autograd.grad(logprobs, [hidden, head.weight], grad)
    theirs = torch.autograd.grad(expected.gather(-1, targets[:, None])[:, 0], [hidden, linear.weight], grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_weight_gets_no_gradient() -> None:
    linear = nn.Linear(4, 6, bias=False).requires_grad_(False)
    hidden = torch.randn(2, 4, requires_grad=True)
    zeros = torch.zeros(2, dtype=torch.long)
    logprobs, _ = VocabularyHead(linear)(hidden, zeros, zeros, torch.zeros(1, 6, dtype=torch.bool), 1.0)
    logprobs.sum().backward()
    assert hidden.grad.any() and linear.weight.grad is None


def test_memory_stays_below_all_logits() -> None:
    """Peak of the logits held is set by the chunk, not by the number of rows."""
    seen = []
    original = torch.Tensor.masked_fill_

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is original:
                seen.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    head = VocabularyHead(nn.Linear(4, 50, bias=False), chunk_elements=200)
    zeros = torch.zeros(30, dtype=torch.long)
    with Watch():
        head(torch.randn(30, 4), zeros, zeros, torch.zeros(1, 50, dtype=torch.bool), 1.0)
    assert max(seen) == 200 and sum(seen) == 30 * 50


def test_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        VocabularyHead(nn.Linear(4, 6))
