"""Attention over one part of the keys, with its log-sum-exp, so that parts can be merged exactly.

softmax over a union of parts = Σ parts' outputs weighted by exp(lse_part − lse), lse being the parts' log-sum-exp. A
flash backward needs only the merged output and lse, so each part's gradient comes from its own kernel call. Kernels
are torch's own, chosen by device and type; `math` is the plain formula for whatever they do not serve.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F

aten = torch.ops.aten


class Kernel(Protocol):
    """query [B, H, N, D], key and value [B, H, T, D]; causal wants N = T."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Output [B, H, N, D], log-sum-exp [B, H, N] (at least float32), and what the backward wants kept."""
        ...

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
        kept: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key, value for this part; out and lse are those of the merged whole."""
        ...


class CpuFlash:
    """torch's flash kernel for CPUs: float64, float32, bfloat16, float16."""

    def forward(self, query, key, value, causal, scale):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, lse, None

    def backward(self, grad, query, key, value, out, lse, causal, scale, kept):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, scale=scale
        )


class GpuFlash:
    """FlashAttention on CUDA and ROCm: bfloat16, float16."""

    def forward(self, query, key, value, causal, scale):
        out, lse, *kept = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse, kept[:6]  # sequence bounds (2), lengths (2), random state (2)

    def backward(self, grad, query, key, value, out, lse, causal, scale, kept):
        bounds_q, bounds_k, length_q, length_k, seed, offset = kept
        return aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, bounds_q, bounds_k, length_q, length_k, 0.0, causal, seed, offset,
            scale=scale,
        )  # fmt: skip


class GpuEfficient:
    """Memory-efficient attention on CUDA and ROCm, for float32. Its log-sum-exp rows are padded to a multiple."""

    def forward(self, query, key, value, causal, scale):
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : query.shape[2]], (lse.shape[-1], seed, offset)

    def backward(self, grad, query, key, value, out, lse, causal, scale, kept):
        padded, seed, offset = kept
        lse = F.pad(lse, (0, padded - lse.shape[-1]), value=float("inf")).contiguous()
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]


class Math:
    """The formula itself, any device and type; materialises the scores."""

    def _scores(self, query, key, causal, scale):
        scores = query @ key.transpose(2, 3) * scale
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return scores

    def forward(self, query, key, value, causal, scale):
        scores = self._scores(query, key, causal, scale)
        lse = scores.logsumexp(-1)
        return (scores - lse[..., None]).exp().to(value.dtype) @ value, lse, None

    def backward(self, grad, query, key, value, out, lse, causal, scale, kept):
        share = (self._scores(query, key, causal, scale) - lse[..., None]).exp()
        inner = (grad @ value.transpose(2, 3)).to(share.dtype) - (grad * out).sum(-1, keepdim=True).to(share.dtype)
        slope = (share * inner * scale).to(query.dtype)
        return slope @ key, slope.transpose(2, 3) @ query, share.to(grad.dtype).transpose(2, 3) @ grad


def kernel_for(query: torch.Tensor) -> Kernel:
    """The kernel for a tensor's device and type."""
    if query.device.type == "cpu":
        return CpuFlash()
    if query.device.type == "cuda" and query.shape[-1] % 8 == 0:
        if query.dtype in (torch.bfloat16, torch.float16):
            return GpuFlash()
        if query.dtype == torch.float32:
            return GpuEfficient()
    return Math()
