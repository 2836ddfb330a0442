"""Attention of the shared-prefix tree, registered with transformers under the name `realvr_tree`.

Every branch sees the trunk (its row's prompt), what hangs between trunk and branch, and its own past. No mask is ever
formed: the trunk's rows run causally on their unpadded slices, and a branch's attention to each visible part is
computed by a flash kernel and merged by log-sum-exp. Towards the shared parts, grouped query heads are folded into
query rows, so that keys and values are never repeated. `dense=True` in the plan does the same by a dense mask.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from realvr.policy.kernels import kernel_for
from realvr.policy.kv import Chunk, KVView, Plan, Segment, fold, repeat_heads
from realvr.policy.readout import dense_readout, merged_readout

NAME = "realvr_tree"
Runs = tuple[tuple[int, int, int], ...]


def split_branches(x: torch.Tensor, branches: int) -> torch.Tensor:
    """[B, H, branches·n, …] → [B·branches, H, n, …]."""
    batch, heads, tokens = x.shape[:3]
    x = x.reshape(batch, heads, branches, tokens // branches, *x.shape[3:])
    return x.transpose(1, 2).reshape(batch * branches, heads, tokens // branches, *x.shape[4:])


def join_branches(x: torch.Tensor, branches: int) -> torch.Tensor:
    """The inverse of `split_branches`."""
    rows, heads, length = x.shape[:3]
    x = x.reshape(rows // branches, branches, heads, length, *x.shape[3:])
    return x.transpose(1, 2).reshape(rows // branches, heads, branches * length, *x.shape[4:])


@dataclass(frozen=True)
class Layout:
    """branches of the query rows; runs of each shared part: (row, row after, first visible column)."""

    branches: int
    runs: tuple[Runs, ...]
    scale: float


class MergedAttention(torch.autograd.Function):
    """Softmax over several shared parts and a causal part of the branch's own, merged by log-sum-exp.

    query [B, H, branches·n, D]; own key, value [B, kv, branches·n, D]; shared: key, value of each part [B, kv, T, D].
    Returns (out like query, lse [B, H, branches·n]); no gradient flows through lse.
    """

    @staticmethod
    def forward(ctx, layout: Layout, query, own_key, own_value, *shared):
        kernel, heads = kernel_for(query), query.shape[1]
        outs, lses, kept = [], [], []
        for runs, key, value in zip(layout.runs, shared[::2], shared[1::2], strict=True):
            pieces = []
            for a, b, start in runs:
                folded = fold(query[a:b], key.shape[1])
                out, lse, keep = kernel.forward(folded, key[a:b, :, start:], value[a:b, :, start:], False, layout.scale)
                pieces.append((out.reshape(query[a:b].shape), lse.reshape(query[a:b].shape[:3])))
                kept.append(keep)
            outs.append(torch.cat([p[0] for p in pieces]))
            lses.append(torch.cat([p[1] for p in pieces]))
        q, k, v = _own(layout, heads, query, own_key, own_value)
        out, lse, keep = kernel.forward(q, k, v, q.shape[2] > 1, layout.scale)
        outs.append(join_branches(out, layout.branches))
        lses.append(join_branches(lse, layout.branches))
        kept.append(keep)
        lse = torch.stack(lses).logsumexp(0)
        merged = sum(o * (part - lse).exp().unsqueeze(-1) for o, part in zip(outs, lses, strict=True)).to(query.dtype)
        ctx.save_for_backward(query, merged, lse, own_key, own_value, *shared)
        ctx.layout, ctx.kept = layout, kept
        ctx.mark_non_differentiable(lse)
        return merged, lse

    @staticmethod
    def backward(ctx, grad, _):
        query, out, lse, own_key, own_value, *shared = ctx.saved_tensors
        layout, kernel, kept = ctx.layout, kernel_for(query), iter(ctx.kept)
        heads, grad = query.shape[1], grad.contiguous()
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        grads = []
        for runs, key, value in zip(layout.runs, shared[::2], shared[1::2], strict=True):
            grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
            for a, b, start in runs:
                rows = (fold(x[a:b], key.shape[1]) for x in (grad, query, out, lse))
                g, q, o, part = (x.contiguous() for x in rows)
                seen = key[a:b, :, start:], value[a:b, :, start:]
                gq, gk, gv = kernel.backward(g, q, *seen, o, part, False, layout.scale, next(kept))
                grad_query[a:b] += gq.reshape(query[a:b].shape)
                grad_key[a:b, :, start:], grad_value[a:b, :, start:] = gk, gv
            grads += [grad_key, grad_value]
        q, k, v = _own(layout, heads, query, own_key, own_value)
        g, o, part = (split_branches(x, layout.branches).contiguous() for x in (grad, out, lse))
        gq, gk, gv = kernel.backward(g, q, k, v, o, part, q.shape[2] > 1, layout.scale, next(kept))
        grad_query += join_branches(gq, layout.branches)
        own = (_sum_heads(join_branches(x, layout.branches), own_key.shape[1]) for x in (gk, gv))
        return None, grad_query.to(query.dtype), *own, *grads


def _own(layout: Layout, heads: int, query, key, value):
    """Query, key and value of the branches' own part, a branch a batch row, heads repeated."""
    parts = (query, repeat_heads(key, heads), repeat_heads(value, heads))
    return tuple(split_branches(x, layout.branches).contiguous() for x in parts)


def _sum_heads(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    batch, heads, tokens, size = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, tokens, size).sum(2)


def trunk_attention(plan: Plan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float):
    """Causal attention of the trunk's rows on their unpadded slices; padding rows give 0. All [B, heads, P, D]."""
    if plan.dense:
        column = torch.arange(query.shape[2], device=query.device)
        starts = torch.tensor(plan.starts, device=query.device)[:, None, None, None]
        seen = (column <= column[:, None]) & ((column >= starts) | (column == column[:, None]))
        return _masked(query, key, value, seen, scale)
    pieces = []
    for a, b, start in plan.runs:
        q, k, v = (x[a:b, :, start:] for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        pieces.append(F.pad(out, (0, 0, start, 0)) if start else out)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _masked(query, key, value, seen: torch.Tensor, scale: float) -> torch.Tensor:
    if query.device.type != "cpu":  # a mask with grouped heads would silently take the math kernel there
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped)


def dense_mask(plan: Plan, segment: Segment, past: list[int], device: torch.device) -> torch.Tensor:
    """bool [B, 1, tokens, Σ past + tokens]: visible trunk columns, all other past, the branch's own up to the token."""
    starts = torch.tensor(plan.starts, device=device)[:, None, None, None]
    trunk = (torch.arange(past[0], device=device) >= starts).expand(-1, -1, segment.tokens, -1)
    index = torch.arange(segment.tokens, device=device)
    branch = index // segment.length
    own = (branch == branch[:, None]) & (index <= index[:, None])
    batch = len(plan.starts)
    between = torch.ones(batch, 1, segment.tokens, sum(past[1:]), dtype=torch.bool, device=device)
    return torch.cat([trunk, between, own.expand(batch, 1, -1, -1)], -1)


def segment_attention(
    view: KVView, segment: Segment, query: torch.Tensor, own: Chunk, shared: list[Chunk], layer: int, scale: float
) -> torch.Tensor:
    """A segment's rows [B, H, tokens, D] attend to the shared chunks (trunk first) and their own; writes readouts."""
    plan = view.plan
    if plan.dense:
        key = torch.cat([*(k for k, _ in shared), own[0]], 2)
        value = torch.cat([*(v for _, v in shared), own[1]], 2)
        seen = dense_mask(plan, segment, [k.shape[2] for k, _ in shared], query.device)
        if plan.readout is None:
            return _masked(query, key, value, seen, scale)
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        scores = (query @ key.transpose(2, 3) * scale).to(torch.promote_types(query.dtype, torch.float32))
        share = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        view.write_readout(layer, dense_readout(plan.readout, segment, share, shared))
        return share.to(value.dtype) @ value
    whole = ((0, query.shape[0], 0),)
    layout = Layout(segment.branches, (plan.runs, *(whole for _ in shared[1:])), scale)
    flat = [x for chunk in shared for x in chunk]
    out, lse = MergedAttention.apply(layout, query, *own, *flat)
    if plan.readout is not None:
        view.write_readout(layer, merged_readout(plan.readout, segment, query, own, shared, lse, scale))
    return out


def _probe(chunk: Chunk, cell: torch.Tensor | None) -> Chunk:
    """The chunk, through a copy of the reference whose gradient norm is added to `cell` in the backward pass."""
    if cell is None or not torch.is_grad_enabled():
        return chunk

    def measure(gradient: torch.Tensor) -> None:
        cell.add_(gradient.detach().to(cell.dtype).square().sum())

    copies = tuple(x.view_as(x) for x in chunk)
    for x in copies:
        if x.requires_grad:
            x.register_hook(measure)
    return copies


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: KVView | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, H, S, D], key and value [B, kv, S, D] → ([B, S, H, D], None).

    With `tree` the rows are the plan's: trunk, then segments. Without it the call is an ordinary one (plain forwards
    and generation with the same model) and goes to transformers' SDPA with the mask given.
    """
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    plan, layer = tree.plan, module.layer_idx
    outs, kept, at = [], [], plan.trunk
    shared = list(tree.past[layer])
    if plan.trunk:
        head = (query[:, :, :at], key[:, :, :at], value[:, :, :at])
        outs.append(trunk_attention(plan, *head, scaling))
        shared = [(head[1], head[2])]
        kept.append(shared[0])
    for segment in plan.segments:
        rows = slice(at, at + segment.tokens)
        own = (key[:, :, rows], value[:, :, rows])
        seen = [_probe(shared[0], segment.gradient_squares), *shared[1:]]
        outs.append(segment_attention(tree, segment, query[:, :, rows], own, seen, layer, scaling))
        if segment.keep:
            kept.append(own)
        at += segment.tokens
    tree.write(layer, kept)
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
