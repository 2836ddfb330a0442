"""Kernels, the merge by log-sum-exp, and its gradients."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from realvr.policy.attention import Layout, MergedAttention, join_branches, split_branches
from realvr.policy.kernels import CpuFlash, GpuEfficient, GpuFlash, Math, kernel_for

DEVICES = [
    ("cpu", CpuFlash(), torch.float64),
    ("cpu", CpuFlash(), torch.bfloat16),
    pytest.param("cuda", GpuFlash(), torch.bfloat16, marks=pytest.mark.skipif("not torch.cuda.is_available()")),
    pytest.param("cuda", GpuEfficient(), torch.float32, marks=pytest.mark.skipif("not torch.cuda.is_available()")),
]


def tensors(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize(("device", "kernel", "dtype"), DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_equals_the_formula(device: str, kernel, dtype: torch.dtype, causal: bool) -> None:
    columns = 24 if causal else 37
    query, key, value, grad = tensors(device, dtype, (2, 3, 24, 32), *[(2, 3, columns, 32)] * 2, (2, 3, 24, 32))
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 6e-2}
    out, lse, kept = kernel.forward(query, key, value, causal, 0.2)
    expected, expected_lse, _ = Math().forward(query, key, value, causal, 0.2)
    torch.testing.assert_close(out, expected, **tolerance)
    torch.testing.assert_close(lse, expected_lse, **tolerance)
    ours = kernel.backward(grad, query, key, value, out, lse, causal, 0.2, kept)
    theirs = Math().backward(grad, query, key, value, expected, expected_lse, causal, 0.2, None)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize(("kernel", "dtype"), [(GpuFlash(), torch.bfloat16), (GpuEfficient(), torch.float32)])
def test_gpu_kernels_are_called_as_torch_declares_them(kernel, dtype: torch.dtype) -> None:
    """Without a GPU: shapes and signatures only, on the meta device. Rows are no multiple of the kernels' padding."""
    query = torch.empty(2, 3, 45, 32, dtype=dtype, device="meta")
    key = torch.empty(2, 3, 70, 32, dtype=dtype, device="meta")
    out, lse, kept = kernel.forward(query, key, key, False, 0.2)
    assert out.shape == query.shape and lse.shape == (2, 3, 45)
    grads = kernel.backward(out, query, key, key, out, lse, False, 0.2, kept)
    assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]


def test_kernel_choice() -> None:
    with FakeTensorMode():
        for device, dtype, size, kind in (
            ("cpu", torch.float32, 32, CpuFlash),
            ("cuda", torch.bfloat16, 64, GpuFlash),
            ("cuda", torch.float32, 64, GpuEfficient),
            ("cuda", torch.float64, 64, Math),
            ("cuda", torch.bfloat16, 20, Math),
        ):
            assert type(kernel_for(torch.empty(1, 1, 1, size, dtype=dtype, device=device))) is kind


def test_branches_split_and_join() -> None:
    x = torch.arange(2 * 3 * 8 * 2).view(2, 3, 8, 2)
    parts = split_branches(x, 4)
    assert parts.shape == (8, 3, 2, 2)
    assert torch.equal(parts[1], x[0, :, 2:4]) and torch.equal(parts[4], x[1, :, :2])
    assert torch.equal(join_branches(parts, 4), x)


def plain(query, own, shared, starts, branches, scale) -> torch.Tensor:
    """The same attention by one masked softmax over all keys."""
    repeats = query.shape[1] // own[0].shape[1]
    key = torch.cat([*shared[::2], own[0]], 2).repeat_interleave(repeats, 1)
    value = torch.cat([*shared[1::2], own[1]], 2).repeat_interleave(repeats, 1)
    rows, length = query.shape[2], query.shape[2] // branches
    before = sum(k.shape[2] for k in shared[::2])
    seen = torch.ones(query.shape[0], 1, rows, before + rows, dtype=torch.bool)
    for b, start in enumerate(starts):
        seen[b, :, :, :start] = False
    for i in range(rows):
        for j in range(rows):
            seen[:, :, i, before + j] = i // length == j // length and j <= i
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize(("branches", "length"), [(3, 4), (1, 1), (4, 1)])
def test_merge_equals_one_softmax(branches: int, length: int) -> None:
    rows, starts = branches * length, (0, 2, 2)
    shapes = [(3, 4, rows, 8), *[(3, 2, rows, 8)] * 2, *[(3, 2, 7, 8)] * 2, *[(3, 2, 3, 8)] * 2]
    query, *rest = (x.requires_grad_() for x in tensors("cpu", torch.float64, *shapes))
    layout = Layout(branches, (((0, 1, 0), (1, 3, 2)), ((0, 3, 0),)), 0.3)
    out, lse = MergedAttention.apply(layout, query, *rest)
    expected = plain(query, rest[:2], rest[2:], starts, branches, 0.3)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (3, 4, rows) and not lse.requires_grad
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad(out, [query, *rest], grad)
    theirs = torch.autograd.grad(expected, [query, *rest], grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert not ours[3][1, :, :2].any()  # padding gets no gradient
