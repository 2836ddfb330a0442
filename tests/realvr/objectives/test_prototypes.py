"""Prototypes of a region, and the bank that finds other images' prototypes (fault 1 of the specification)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from realvr.objectives.prototypes import PrototypeBank, per_slot, positive, spread, union


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[float(v), -float(v)] for v in values])


def test_positive_is_the_mean_of_the_union_of_boxes():
    features = torch.arange(12.0).view(6, 2).requires_grad_()
    got = positive(features, [[1, 2], [2, 5]])
    torch.testing.assert_close(got, (features[1] + features[2] + features[5]).detach() / 3)
    assert not got.requires_grad


def test_positive_without_a_box_is_the_whole_image():
    features = torch.arange(12.0).view(6, 2)
    torch.testing.assert_close(positive(features, []), features.mean(0))
    torch.testing.assert_close(positive(features, [[], []]), features.mean(0))


def test_positive_of_half_precision_is_a_float32_mean():
    features = (1 + torch.rand(4096, 3, generator=torch.Generator().manual_seed(0))).bfloat16()
    got = positive(features, [])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, features.double().mean(0).float(), rtol=1e-6, atol=0)
    assert positive(features.double(), []).dtype == torch.float64


def test_a_token_outside_the_image_is_refused():
    for box in ([6], [-1]):
        with pytest.raises(ValueError, match="outside"):
            union([box], 6)


def test_slots_follow_the_boxes_in_order():
    features = torch.arange(6.0)[:, None].requires_grad_()
    got = per_slot(features, [[4, 5], [0, 1]], 4)
    torch.testing.assert_close(got[:, 0], torch.tensor([4.0, 5.0, 0.0, 1.0]))
    assert not got.requires_grad
    torch.testing.assert_close(per_slot(features, [[2]], 3)[:, 0], torch.tensor([2.0, 2.0, 2.0]))


@given(st.integers(1, 400), st.integers(1, 20))
@settings(deadline=None)
def test_spread_is_even_ordered_and_inside(n, k):
    got = spread(n, k)
    assert len(got) == k and got == sorted(got) and got[0] >= 0 and got[-1] < n
    if n == k:
        assert got == list(range(n))
    counts = [got.count(i) for i in range(n)]
    assert max(counts) - min(counts) <= 1


def test_the_batch_comes_first_then_earlier_steps_newest_first():
    bank = PrototypeBank(10)
    bank.update(["a", "b"], rows(1, 2))
    bank.update(["c"], rows(3))
    bank.update(["d", "e", "d"], rows(4, 5, 99))
    torch.testing.assert_close(bank.select("e", 9), rows(4, 3, 1, 2))
    torch.testing.assert_close(bank.select("d", 2), rows(5, 3))
    assert len(bank) == 5


def test_never_the_own_image_and_never_one_image_twice():
    bank = PrototypeBank(10)
    bank.update(["a", "b", "a"], rows(1, 2, 3))
    bank.update(["b", "a", "c"], rows(4, 5, 6))
    torch.testing.assert_close(bank.select("a", 9), rows(6, 4))
    torch.testing.assert_close(bank.select("b", 9), rows(5, 6))
    torch.testing.assert_close(bank.select("unseen", 9), rows(4, 5, 6))


def test_examples_of_a_batch_meet_different_negatives():
    bank = PrototypeBank(0)
    bank.update(list("abcd"), rows(1, 2, 3, 4))
    torch.testing.assert_close(bank.select("a", 2), rows(2, 3))
    torch.testing.assert_close(bank.select("c", 2), rows(4, 1))


@given(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 7))
@settings(deadline=None, max_examples=80)
def test_bank_against_the_history_of_everything_seen(steps, n):
    """Expected: go back through the history step by step and take each other key where it is met first."""
    bank, history = PrototypeBank(100), []
    for i, keys in enumerate(steps):
        values = [10 * i + j for j in range(len(keys))]
        bank.update(keys, rows(*values))
        history.append(list(zip(keys, values, strict=True)))
    for key in "abcdef":
        newest = history[-1]
        distinct = [k for j, (k, _) in enumerate(newest) if k not in [x for x, _ in newest[:j]]]
        turn = distinct.index(key) + 1 if key in distinct else 0
        order = distinct[turn:] + distinct[:turn]
        wanted = {k: next(v for x, v in newest if x == k) for k in order if k != key}
        for step in reversed(history[:-1]):
            for k, v in step:
                if k != key:
                    wanted.setdefault(k, v)
        if not wanted:
            with pytest.raises(UserError):
                bank.select(key, n)
        else:
            assert bank.select(key, n)[:, 0].tolist() == list(wanted.values())[:n]


def test_capacity_bounds_what_is_kept_of_earlier_steps():
    bank = PrototypeBank(3)
    for i in range(5):
        bank.update([f"{i}a", f"{i}b"], rows(2 * i, 2 * i + 1))
    torch.testing.assert_close(bank.select("other", 99), rows(8, 9, 6, 7, 4))


def test_zero_distinct_negatives_stop_the_run():
    bank = PrototypeBank(10)
    for _ in range(3):
        bank.update(["one.png", "one.png"], rows(1, 2))
    with pytest.raises(UserError, match=r"no other image than 'one\.png'") as raised:
        bank.select("one.png", 16)
    assert "\n" not in str(raised.value) and "negative_key" in str(raised.value)
    assert bank.select("one.png", 0).shape == (0, 2)


def test_fewer_than_asked_are_masked_and_countable():
    bank = PrototypeBank(10)
    bank.update(["a", "b", "c"], rows(1, 2, 3))
    table, mask = bank.negatives(["a", "zz"], 4)
    assert table.shape == (2, 4, 2) and mask.sum(1).tolist() == [2, 3]
    torch.testing.assert_close(table[0], torch.cat([rows(2, 3), torch.zeros(2, 2)]))


def test_state_survives_a_checkpoint(tmp_path):
    bank = PrototypeBank(3)
    for i in range(3):
        bank.update([f"{i}a", f"{i}b"], rows(2 * i, 2 * i + 1).requires_grad_())
    torch.save(bank.state_dict(), tmp_path / "bank.pt")
    other = PrototypeBank(3)
    other.load_state_dict(torch.load(tmp_path / "bank.pt", weights_only=True))
    for b in (bank, other):
        b.update(["x"], rows(50))
    torch.testing.assert_close(other.select("x", 9), bank.select("x", 9), rtol=0, atol=0)
    assert other.select("x", 9).shape[0] == 3
    empty = PrototypeBank(3)
    empty.load_state_dict(PrototypeBank(3).state_dict())
    assert len(empty) == 0
