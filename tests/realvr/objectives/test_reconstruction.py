"""Stage 1's losses against loops; the state that is compared stands one position earlier."""

import pytest
import torch

from realvr.objectives.reconstruction import latent_mse, text_ce


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1]]).bool()


def test_latent_mse_equals_the_loop_in_value_and_gradient():
    hidden, target = draw(0, 2, 6, 3).requires_grad_(), draw(1, 5, 3).requires_grad_()
    got = latent_mse(hidden, target, MASK, elements=100)
    wanted, m = 0.0, 0
    for b in range(2):
        for t in range(6):
            if MASK[b, t]:
                wanted = wanted + sum((hidden[b, t - 1, i] - target.detach()[m, i]) ** 2 for i in range(3))
                m += 1
    wanted = wanted / 100
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    mine, theirs = (torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (got, wanted))
    torch.testing.assert_close(mine, theirs)
    got.backward()
    assert target.grad is None


def test_latent_mse_of_rows_sums_to_that_of_the_batch():
    hidden, target = draw(0, 2, 6, 3), draw(1, 5, 3)
    parts = latent_mse(hidden[:1], target[:2], MASK[:1], 15) + latent_mse(hidden[1:], target[2:], MASK[1:], 15)
    torch.testing.assert_close(parts, latent_mse(hidden, target, MASK, 15))


def test_latent_mse_is_computed_in_float32():
    got = latent_mse(draw(0, 2, 6, 3).bfloat16(), draw(1, 5, 3).bfloat16(), MASK, 15)
    assert got.dtype == torch.float32


def test_latent_mse_refuses_what_cannot_be_aligned():
    with pytest.raises(ValueError, match="position 0"):
        latent_mse(draw(0, 1, 3, 2), draw(1, 1, 2), torch.tensor([[True, False, False]]), 2)
    with pytest.raises(ValueError, match=r"\(5, 3\) latent states but \(4, 3\)"):
        latent_mse(draw(0, 2, 6, 3), draw(1, 4, 3), MASK, 15)


def test_text_ce_reads_supervised_labels_only():
    logprobs = -draw(0, 2, 4).abs()
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    wanted = -(logprobs[0, 1] + logprobs[0, 2] + logprobs[1, 0]) / 7
    torch.testing.assert_close(text_ce(logprobs.masked_fill(~mask, -torch.inf), mask, 7), wanted)
