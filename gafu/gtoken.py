"""GToken: generation latents compressed into G tokens of the understanding model's width, and back (stage 1)."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from gafu.config import GTokenSettings
from gafu.rope import cell_centres, plane_angles, rotate

Grid = tuple[int, int]


class Block(nn.Module):
    """Pre-norm transformer layer, attention among all tokens, rotated by their places."""

    def __init__(self, settings: GTokenSettings):
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.norm_attention, self.norm_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.ffn = nn.Sequential(nn.Linear(width, settings.ffn), nn.GELU(), nn.Linear(settings.ffn, width))
        if settings.locality:
            # Equal biases score a pair by the cosines of its offset alone: most for the same place, less further off.
            head_dim = width // settings.heads
            bias = (settings.locality / head_dim**0.5) ** 0.5
            for linear in (self.q, self.k):
                nn.init.constant_(linear.bias, bias)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, reads: slice = slice(None)) -> torch.Tensor:
        """x [n, T, w], angles [T, head_dim / 2] → [n, T', w]: the tokens of `reads`, having read all of x."""
        n, _, width = x.shape
        normed = self.norm_attention(x)

        def split(states: torch.Tensor) -> torch.Tensor:
            return states.view(n, -1, self.heads, width // self.heads).transpose(1, 2)

        q = rotate(split(self.q(normed[:, reads])), angles[reads])
        k, v = rotate(split(self.k(normed)), angles), split(self.v(normed))
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x[:, reads] + self.o(mixed)
        return x + self.ffn(self.norm_ffn(x))


class _Translator(nn.Module):
    """Tokens on one grid → tokens on another: learned queries at the second grid's places join the sequence."""

    def __init__(self, settings: GTokenSettings, inner: int, outer: int, queries: int):
        super().__init__()
        self.base, self.head_dim = settings.rope_base, settings.width // settings.heads
        self.enter = nn.Linear(inner, settings.width)
        self.queries = nn.Parameter(torch.randn(queries, settings.width) * 0.02)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.leave = nn.Linear(settings.width, outer)

    def forward(self, tokens: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """tokens [n, S, inner] at source [S, 2] → [n, T, outer] at target [T, 2]."""
        x = self.enter(tokens)
        queries = self.queries.expand(len(target), -1)  # one mask token, or a query a place
        x = torch.cat([x, queries.expand(len(x), -1, -1)], 1)
        angles = plane_angles(torch.cat([source, target]).to(x.device), self.head_dim, self.base)
        for block in self.blocks[:-1]:
            x = block(x, angles)
        x = self.blocks[-1](x, angles, slice(len(source), None))  # the source's last states are read by nobody
        return self.leave(self.norm(x))


class GTokenEncoder(nn.Module):
    """R_G [n, h, w, c] → G [n, 256, d_und]. Query (i, j) sits at the centre of its cell, in R_G's coordinates."""

    def __init__(self, settings: GTokenSettings, channels: int, d_und: int):
        super().__init__()
        self.grid = settings.grid
        self.translate = _Translator(settings, channels, d_und, settings.grid[0] * settings.grid[1])

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        frame = tuple(latents.shape[1:3])
        return self.translate(latents.flatten(1, 2), cell_centres(frame, frame), cell_centres(self.grid, frame))


class GTokenDecoder(nn.Module):
    """G [n, 256, d_und] → R_G [n, h, w, c]: one mask token, told apart by its place, asks for each latent."""

    def __init__(self, settings: GTokenSettings, channels: int, d_und: int):
        super().__init__()
        self.grid = settings.grid
        self.translate = _Translator(settings, d_und, channels, 1)

    def forward(self, tokens: torch.Tensor, frame: Grid) -> torch.Tensor:
        """frame: (h, w) of R_G."""
        out = self.translate(tokens, cell_centres(self.grid, frame), cell_centres(frame, frame))
        return out.unflatten(1, frame)
