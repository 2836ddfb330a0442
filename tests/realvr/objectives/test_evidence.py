"""Evidence gaps, hinge and routing against loops in float64; what carries gradient and what must not."""

import math

import pytest
import torch

from realvr.config import EvidenceSettings
from realvr.objectives.evidence import gaps, hinge
from realvr.objectives.routing import ROUTINGS, Credit, weights

B, K, N, D, W = 3, 4, 5, 6, 3


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b) -> torch.Tensor:
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


def loop_gaps(z, positive, negatives, mask) -> torch.Tensor:
    rows = []
    for b in range(len(z)):
        for t in range(z.shape[1]):
            p = positive[b] if positive.dim() == 2 else positive[b, t]
            others = [cosine(z[b, t], negatives[b, n]) for n in range(negatives.shape[1]) if mask[b, n]]
            rows.append(cosine(z[b, t], p) - (max(others) if others else 0.0))
    return torch.stack(rows).view(len(z), -1)


@pytest.mark.parametrize("shape", [(B, D), (B, K, D)], ids=["shared", "per_slot"])
def test_gaps_equal_the_loop_in_value_and_gradient(shape):
    z = draw(0, B, K, D).requires_grad_()
    positive, negatives = draw(1, *shape), draw(2, B, N, D)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 1]]).bool()
    negatives[~mask] = 1e9 * z.detach()[:1, 0]  # what is masked would win the maximum
    got, wanted = gaps(z, positive, negatives, mask), loop_gaps(z, positive, negatives, mask)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    scale = draw(3, B, K)
    (mine,), (theirs,) = (torch.autograd.grad((x * scale).sum(), z) for x in (got, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def test_prototypes_get_no_gradient():
    z, positive, negatives = (draw(i, *s).requires_grad_() for i, s in enumerate([(B, K, D), (B, D), (B, N, D)]))
    gaps(z, positive, negatives, torch.ones(B, N)).sum().backward()
    assert z.grad.abs().sum() > 0
    assert positive.grad is None and negatives.grad is None


def test_without_negatives_the_gap_is_the_cosine():
    z, positive = draw(0, B, K, D), draw(1, B, D)
    alone = torch.stack([torch.stack([cosine(z[b, t], positive[b]) for t in range(K)]) for b in range(B)])
    for negatives, mask in (
        (None, None),
        (torch.zeros(B, 0, D), torch.zeros(B, 0)),
        (draw(2, B, N, D), torch.zeros(B, N)),
    ):
        torch.testing.assert_close(gaps(z, positive, negatives, mask), alone, rtol=1e-12, atol=1e-14)


def test_half_precision_is_computed_in_float32():
    z, positive, negatives = (draw(i, *s).bfloat16() for i, s in enumerate([(B, K, D), (B, D), (B, N, D)]))
    got = gaps(z, positive, negatives)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, gaps(z.double(), positive.double(), negatives.double()).float())


def test_hinge_equals_the_loop_and_masked_rows_cost_nothing():
    g = (0.5 * draw(0, B, K)).requires_grad_()
    w = draw(1, B, K).abs()
    got = hinge(g, w, 0.5, torch.tensor([True, False, True]))
    for b in range(B):
        wanted = sum(float(w[b, t]) * max(0.0, 0.5 - float(g[b, t])) for t in range(K)) if b != 1 else 0.0
        assert math.isclose(float(got[b]), wanted, rel_tol=1e-12)
    (gradient,) = torch.autograd.grad(got.sum(), g)
    wanted = torch.where(g < 0.5, -w, 0.0)
    wanted[1] = 0
    torch.testing.assert_close(gradient, wanted.detach())


def credit(seed: int = 0, number: tuple[int, ...] = (3, 1, 0)) -> Credit:
    right, wrong = draw(seed, B, K).abs(), draw(seed + 1, B, W, K).abs()
    mask = torch.arange(W)[None] < torch.tensor(number)[:, None]
    return Credit(right, wrong.masked_fill(~mask[..., None], torch.nan), mask, draw(seed + 2, B, K))


def test_contrast_takes_the_mean_over_wrong_answers():
    """Max in the mean's place, or a division by the padded number, must fail here."""
    c = credit()
    got = ROUTINGS["contrast"](c, c.right)
    for b, n in enumerate((3, 1, 0)):
        for t in range(K):
            mean = sum(float(c.wrong[b, i, t]) for i in range(n)) / n if n else math.inf
            assert math.isclose(float(got[b, t]), max(0.0, float(c.right[b, t]) - mean), abs_tol=1e-14)
    assert (got[0] > 0).any() and got[2].abs().max() == 0
    none = Credit(c.right, torch.zeros(B, 0, K), torch.zeros(B, 0))
    assert ROUTINGS["contrast"](none, c.right).abs().max() == 0


def test_raw_uniform_and_causal():
    c = credit()
    torch.testing.assert_close(ROUTINGS["raw"](c, c.right), c.right)
    assert ROUTINGS["uniform"](Credit(), c.right).abs().max() == 0
    causal = ROUTINGS["causal"](Credit(drops=c.drops), c.right)
    torch.testing.assert_close(causal, torch.tensor([[max(0.0, float(x)) for x in row] for row in c.drops]).double())
    assert (c.drops < 0).any() and (causal > 0).any()


def test_weights_are_floor_plus_gamma():
    c = credit()
    w, gamma = weights(c, EvidenceSettings(), c.right)
    torch.testing.assert_close(w, 0.3 / K + 0.7 * gamma, rtol=1e-12, atol=0)
    torch.testing.assert_close(w[2], torch.full((K,), 0.3 / K).double())
    pure, gamma = weights(c, EvidenceSettings(floor=0.0), c.right)
    torch.testing.assert_close(pure, gamma)


def test_uniform_is_floor_one_whatever_the_floor():
    w, gamma = weights(Credit(), EvidenceSettings(routing="uniform", floor=0.3), draw(0, B, K))
    torch.testing.assert_close(w, torch.full((B, K), 1 / K).double())
    assert gamma.abs().max() == 0


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_mass_matched_weights_sum_to_one(routing):
    w, _ = weights(credit(), EvidenceSettings(routing=routing, mass_matched=True), draw(0, B, K))
    torch.testing.assert_close(w.sum(-1), torch.ones(B).double())
    nothing, _ = weights(credit(number=(0, 0, 0)), EvidenceSettings(floor=0.0, mass_matched=True), draw(0, B, K))
    assert nothing.abs().max() == 0  # pure contrast without wrong answers has no mass to match


def test_normalised_gamma_sums_to_one_where_there_is_any():
    _, gamma = weights(credit(), EvidenceSettings(normalise_gamma=True), draw(0, B, K))
    torch.testing.assert_close(gamma.sum(-1), torch.tensor([1.0, 1.0, 0.0]).double())


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("routing", ["contrast", "raw", "causal"])
def test_gradient_through_the_weights_only_when_asked(routing, detach):
    base = draw(9, B, K).requires_grad_()
    c = credit()
    c = Credit(base.abs() + 5, c.wrong, c.wrong_mask, base)
    like = draw(0, B, K).requires_grad_()
    w, _ = weights(c, EvidenceSettings(routing=routing, detach_weights=detach), like)
    assert w.requires_grad is not detach
    if not detach:
        w.sum().backward()
        assert base.grad.abs().sum() > 0 and like.grad is None
