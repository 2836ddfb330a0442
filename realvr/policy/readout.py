"""The readout: how much attention an answer's content tokens pay to each latent (paper, stage 2, step 4).

r_t(y) = post-softmax attention from the content tokens of answer y to latent t, averaged over decoder layers, heads and
content tokens. Here one layer's share; `KVView.readout` takes the mean over layers.
"""

import torch

from realvr.policy.kv import Chunk, Readout, Segment, repeat_heads


def _mean_rows(readout: Readout, share: torch.Tensor) -> torch.Tensor:
    """share [B, H, branches, n, K] → mean over heads and the rows asked for, [B, branches, K]."""
    rows = readout.rows[..., None].to(share.dtype)
    return (share.mean(1) * rows).sum(2) / rows.sum(2).clamp(min=1)


def merged_readout(
    readout: Readout,
    segment: Segment,
    query: torch.Tensor,
    own: Chunk,
    shared: list[Chunk],
    lse: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Readout [B, branches, K] of one layer from the log-sum-exp that the kernels gave: no other column is touched.

    query [B, H, tokens, D]; own and shared: the segment's and the visible chunks, trunk first; lse [B, H, tokens].
    """
    batch, heads, _, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    by_branch = query.reshape(batch, heads, segment.branches, segment.length, size).to(wide)
    past = torch.cat([k for k, _ in shared[1:]], 2)[:, :, 1:]  # column 0 is `<|lvr_start|>`
    past = repeat_heads(past, heads).to(wide)
    mine = own[0].reshape(batch, -1, segment.branches, segment.length, size)[..., : readout.own, :]
    mine = mine.repeat_interleave(heads // mine.shape[1], 1).to(wide)
    scores = torch.cat([by_branch @ past[:, :, None].transpose(3, 4), by_branch @ mine.transpose(3, 4)], -1) * scale
    share = (scores - lse.reshape(batch, heads, segment.branches, segment.length, 1)).exp()
    return _mean_rows(readout, share)


def dense_readout(readout: Readout, segment: Segment, share: torch.Tensor, shared: list[Chunk]) -> torch.Tensor:
    """The same from whole attention rows, share [B, H, tokens, all keys]; differentiable."""
    trunk = shared[0][0].shape[2]
    before = trunk + sum(k.shape[2] for k, _ in shared[1:])
    by_branch = share.reshape(*share.shape[:2], segment.branches, segment.length, share.shape[-1])
    past = by_branch[..., trunk + 1 : before]
    first = before + segment.length * torch.arange(segment.branches, device=share.device)
    columns = first[:, None] + torch.arange(readout.own, device=share.device)
    columns = columns[None, None, :, None].expand(*by_branch.shape[:4], -1)
    return _mean_rows(readout, torch.cat([past, by_branch.gather(-1, columns)], -1))
