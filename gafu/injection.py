"""Stage 2's trained part: states of the understanding path look G tokens up after its layers; LoRA; the baselines."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from gafu.backbones.base import Adapter, Batch, Geometry, Grid
from gafu.config import InjectionSettings, LoraSettings
from launch.errors import UserError


def chosen_layers(settings: InjectionSettings, n_layers: int) -> tuple[int, ...]:
    """Layers (from 0) after which G is looked up, rising. UserError for layers that the backbone lacks."""
    if settings.kind not in ("text", "visual"):
        return ()
    candidates = n_layers - 1  # all but the last
    if settings.layers == "all":
        return tuple(range(candidates))
    if settings.layers == "sparse":
        if settings.sparse_count > candidates:
            raise UserError(
                f"injection.sparse_count is {settings.sparse_count}; the backbone has {candidates} layers before its "
                "last one: give at most that many"
            )
        step = candidates / settings.sparse_count
        return tuple(int((i + 0.5) * step) for i in range(settings.sparse_count))
    chosen = tuple(sorted(set(settings.layers)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= n_layers:
        raise UserError(f"injection.layers is {list(settings.layers)}; give layers from 0 to {n_layers - 1}")
    return chosen


class RMSNorm(nn.Module):
    """x / rms(x) · w, computed in float32 at least."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class LayerLookup(nn.Module):
    """The attention after one layer; W_o is 0 at the start, so that the model starts as it was."""

    def __init__(self, d: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm = RMSNorm(d)
        self.q, self.k, self.v = (nn.Linear(d, heads * head_dim, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, d, bias=False)
        nn.init.zeros_(self.o.weight)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[n, T, heads·head_dim] → [n, heads, T, head_dim]."""
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)


class Injection(nn.Module):
    """G in the understanding path, one of the kinds of `InjectionSettings`; and the null embedding that U is masked by.

    grid: rows and columns of the tokens that are injected; width: their own width (`d_und` for G tokens, and for U as
    the control).
    """

    def __init__(self, settings: InjectionSettings, geometry: Geometry, grid: Grid, width: int | None = None):
        super().__init__()
        self.settings, self.grid = settings, grid
        self.u_grid = geometry.u_grid
        d = geometry.d_und
        self.null = nn.Parameter(torch.randn(d) * 0.02)
        if settings.kind == "none":
            return
        self.project = nn.Linear(width or d, d)
        self.norm = RMSNorm(d)
        if settings.key_positions != "native":
            self.rows, self.columns = (nn.Parameter(torch.randn(n, d) * 0.02) for n in grid)
        heads = settings.heads or geometry.heads
        chosen = chosen_layers(settings, geometry.n_layers)
        self.layers = nn.ModuleDict({str(i): LayerLookup(d, heads, geometry.head_dim) for i in chosen})
        if settings.kind == "entry":
            self.enter = nn.Linear(d, d, bias=False)
            nn.init.zeros_(self.enter.weight)

    @property
    def extra_slots(self) -> int:
        """Visual tokens that `Adapter.build_batch` must add to an image."""
        return self.grid[0] * self.grid[1] if self.settings.kind == "concat" else 0

    def bind(self, adapter: Adapter, batch: Batch, tokens: torch.Tensor) -> "Bound | None":
        """Tie tokens [n, T, width] to a batch's n images, for forwards over it; P(G) is computed here, once.

        None for the kind `none`. ValueError when tokens do not fit the batch or the grid.
        """
        if self.settings.kind == "none":
            return None
        expected = (len(batch.image_rows), self.grid[0] * self.grid[1])
        if tuple(tokens.shape[:2]) != expected:
            raise ValueError(f"tokens are {tuple(tokens.shape[:2])}; the batch's images and the grid want {expected}")
        content = self.project(tokens.to(self.project.weight.dtype))
        if self.settings.key_positions != "native":
            content = content + (self.rows[:, None] + self.columns).flatten(0, 1)
        positions = None
        if self.settings.key_positions != "learned" and self.layers:
            positions = adapter.gtoken_positions(batch, self.grid)
        return Bound(self, adapter, batch.image_rows, self.norm(content), positions)


@dataclass
class Bound:
    """G tokens of one batch: content Norm(P(G)) [n, T, d], rotary positions [n, T] of its keys (None: not rotated)."""

    injection: Injection
    adapter: Adapter
    image_rows: torch.Tensor
    content: torch.Tensor
    positions: torch.Tensor | None
    _kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def visual(self, understanding: torch.Tensor) -> torch.Tensor:
        """U [n, Nu, d] as it enters the sequence: joined by G (`concat`), added to (`entry`), or as it is."""
        kind = self.injection.settings.kind
        if kind == "concat":
            return torch.cat([understanding, self.content.to(understanding.dtype)], 1)
        if kind == "entry":
            planes = self.content.transpose(1, 2).unflatten(2, self.injection.grid)
            at_u = nn.functional.interpolate(planes, self.injection.u_grid, mode="bilinear", align_corners=False)
            added = self.injection.enter(at_u.flatten(2).transpose(1, 2))
            return understanding + added.to(understanding.dtype)
        return understanding

    def queries(self, positions: torch.Tensor, text: torch.Tensor, visual: torch.Tensor) -> "Lookup | None":
        """The lookup of one forward over tokens at positions [B, S], where masks [B, S] tell text and visual tokens."""
        if not self.injection.layers:
            return None
        reads = (visual if self.injection.settings.kind == "visual" else text)[self.image_rows]
        longest = int(reads.sum(1).max()) if len(reads) else 0
        if longest == 0:
            return None
        # Readers first, in order; the tail of a row with fewer of them is cut off by `valid`.
        columns = (~reads).long().argsort(dim=1, stable=True)[:, :longest]
        valid = reads.gather(1, columns)
        return Lookup(self, columns, valid, positions[self.image_rows].gather(1, columns))

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer [n, heads, T, head_dim]; kept for the next call where no gradient is wanted (decoding)."""
        if layer in self._kept and not torch.is_grad_enabled():
            return self._kept[layer]
        part = self.injection.layers[str(layer)]
        k, v = part.split(part.k(self.content)), part.split(part.v(self.content))
        if self.positions is not None:
            k = self.adapter.rotary(k, self.positions)
        if not torch.is_grad_enabled():
            self._kept[layer] = (k, v)
        return k, v


@dataclass(frozen=True)
class Lookup:
    """One forward's: which columns [n, L] of each image's row read G, whether each is there, and at what position."""

    bound: Bound
    columns: torch.Tensor
    valid: torch.Tensor
    positions: torch.Tensor

    def after_layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """h + m · W_o·Attn(q = Norm(h), k, v = Norm(P(G))): hidden [B, S, d] → the same shape."""
        bound = self.bound
        if str(layer) not in bound.injection.layers:
            return hidden
        part: LayerLookup = bound.injection.layers[str(layer)]
        rows = bound.image_rows[:, None]
        q = part.split(part.q(part.norm(hidden[rows, self.columns].to(part.q.weight.dtype))))
        if bound.positions is not None:
            q = bound.adapter.rotary(q, self.positions)
        k, v = bound.keys_values(layer)
        found = part.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        found = (found * self.valid[..., None]).to(hidden.dtype)
        return hidden.index_put((rows.expand_as(self.columns), self.columns), found, accumulate=True)


def add_lora(adapter: Adapter, settings: LoraSettings) -> list[nn.Parameter]:
    """Put peft's adapters (dropout 0) on the understanding path; its trained parameters.

    They are float32 at least, also on a bfloat16 backbone, which would round small updates away.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(adapter.lora_targets())
    config = LoraConfig(r=settings.r, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)
    model = adapter.understanding_model()
    inject_adapter_in_model(config, model)
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    for parameter in trained:
        parameter.data = parameter.data.to(torch.promote_types(torch.float32, parameter.dtype))
        parameter.requires_grad_(True)
    return trained


@contextmanager
def lora_off(adapter: Adapter) -> Iterator[None]:
    """The frozen original of the reference branch: adapters are skipped inside. Run no backward inside."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    parts: Sequence[BaseTunerLayer] = [m for m in adapter.modules() if isinstance(m, BaseTunerLayer)]
    for part in parts:
        part.enable_adapters(False)
    try:
        yield
    finally:
        for part in parts:
            part.enable_adapters(True)
