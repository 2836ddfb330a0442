"""What a unified multimodal model must offer: two frozen visual pathways and an understanding model to train beside."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import nn

from gafu.config import BackboneSettings

Grid = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a backbone. Grids are (rows, columns)."""

    d_und: int
    """Width of the understanding model."""
    n_layers: int
    """Its layers."""
    heads: int
    """Its attention heads."""
    head_dim: int
    """Width of a head."""
    u_grid: Grid
    """Understanding tokens U, in raster order."""
    g_grid: Grid
    """Generation latents R_G."""
    g_channels: int
    """Their channels."""
    bind_channels: int
    """Channels of the targets that G tokens are bound to."""
    understanding_px: int
    """Side of the square image that the understanding pathway sees."""
    generation_px: int
    """Side of the one that the generation pathway sees and decodes."""
    pixel_range: tuple[float, float] = (-1.0, 1.0)
    """Range of generation pixels."""
    bind_grid: Grid = (16, 16)
    """Grid of the G tokens and of their targets."""
    bind_energy: bool = False
    """Divide L_spa by the targets' mean energy (targets whose scale is not near 1)."""

    @property
    def u_tokens(self) -> int:
        return self.u_grid[0] * self.u_grid[1]


@dataclass(frozen=True)
class Pixels:
    """The same images as each pathway sees them."""

    understanding: torch.Tensor
    """[n, 3, H, W], normalised as the understanding pathway wants it."""
    generation: torch.Tensor
    """[n, 3, H', W'] in `Geometry.pixel_range`; what `decode_generation` is compared with."""


@dataclass(frozen=True)
class Row:
    """One question; `answer` None is a prompt to be continued. `image` False is a text-only row."""

    question: str
    answer: str | None = None
    image: bool = True


@dataclass(frozen=True)
class Batch:
    """Rows as tensors of shape [B, S], on the adapter's device."""

    ids: torch.Tensor
    """Token ids; padding has the pad id."""
    mask: torch.Tensor
    """True on tokens, False on padding."""
    positions: torch.Tensor
    """Rotary position of each token, counted from 0 in its row (a backbone may let an image share one)."""
    visual: torch.Tensor
    """True where a visual token stands in."""
    labels: torch.Tensor
    """The token itself on answer tokens (end of text included), else -100: row s is predicted from column s − 1."""
    image_rows: torch.Tensor
    """[n] rows that have an image, in order: visual tokens and G tokens come as [n, tokens, d]."""
    slots: int
    """Visual tokens an image: `u_tokens`, plus what `build_batch` was asked to add."""

    @property
    def text(self) -> torch.Tensor:
        """m_text [B, S]: tokens that are no visual tokens and no padding."""
        return self.mask & ~self.visual

    @property
    def answers(self) -> torch.Tensor:
        """[B, S]: columns whose logits predict an answer token."""
        ahead = torch.zeros_like(self.mask)
        ahead[:, :-1] = self.labels[:, 1:] != -100
        return ahead

    @property
    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(answer tokens [A], their rows [A]) in the order of `forward(…, keep=batch.answers)`."""
        rows, columns = self.answers.nonzero(as_tuple=True)
        return self.labels[rows, columns + 1], rows


class LayerInjection(Protocol):
    """What a layer's output passes through: bound to one forward call (`gafu.injection.Lookup`)."""

    def after_layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Output of layer `layer` [B, S, d] → what the next layer reads."""
        ...


class BoundInjection(Protocol):
    """G tokens of a batch, ready for any number of forwards over its rows (`gafu.injection.Bound`)."""

    def visual(self, understanding: torch.Tensor) -> torch.Tensor:
        """Visual tokens as they enter the sequence: U [n, Nu, d] → [n, slots, d]."""
        ...

    def queries(self, positions: torch.Tensor, text: torch.Tensor, visual: torch.Tensor) -> LayerInjection | None:
        """For a forward over tokens at `positions` [B, S]; masks [B, S] say which are text and which visual."""
        ...


KEYWORD = "gafu_injection"


def _after(index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    # The injection comes with the call, not from shared state: a checkpointed layer keeps its call's arguments, so the
    # recomputation in the backward pass reads the same G as the forward pass did.
    injection: LayerInjection | None = kwargs.get(KEYWORD)
    return output if injection is None else injection.after_layer(index, output)


class Adapter(nn.Module, ABC):
    """Adapter of one kind of backbone. Everything it loads is frozen; only adapters put on later train."""

    geometry: Geometry

    @classmethod
    @abstractmethod
    def load(cls, settings: BackboneSettings) -> "Adapter":
        """Read a checkpoint folder. UserError if it cannot be read or weights are missing."""

    @classmethod
    @abstractmethod
    def dry(cls, settings: BackboneSettings) -> "Adapter":
        """From config.json alone, on the meta device."""

    @abstractmethod
    def understanding_model(self) -> nn.Module:
        """The language model whose layers are injected into and get adapters."""

    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Its decoder layers, first to last; each passes keyword arguments through and returns states [B, S, d]."""

    @abstractmethod
    def preprocess(self, images: Sequence[Image.Image]) -> Pixels:
        """Pictures → pixels of both pathways. UserError when an image is too small."""

    @abstractmethod
    def understanding_tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """U [n, Nu, d_und] from `Pixels.understanding`, no gradient."""

    @abstractmethod
    def generation_latents(self, pixels: torch.Tensor) -> torch.Tensor:
        """R_G [n, h, w, c] from `Pixels.generation`, no gradient, the same at every call (never a sample)."""

    @abstractmethod
    def bind_target(self, latents: torch.Tensor, grid: Grid | None = None) -> torch.Tensor:
        """R_G [n, h, w, c] → what the G token of each cell is bound to [n, 16, 16, cb] (or on another `grid`)."""

    @abstractmethod
    def decode_generation(self, latents: torch.Tensor) -> torch.Tensor:
        """R_G [n, h, w, c] → pixels [n, 3, H, W], unclamped, with gradient to the latents."""

    @abstractmethod
    def build_batch(self, rows: Sequence[Row], extra_slots: int = 0, pad: str = "right") -> Batch:
        """Questions (and answers) by the checkpoint's chat template; `extra_slots` more visual tokens an image.

        pad: `right` for training, `left` for `generate`.
        """

    @abstractmethod
    def embed(self, batch: Batch, visual: torch.Tensor) -> torch.Tensor:
        """Input embeddings [B, S, d] with visual tokens [n, slots, d] in their places."""

    @abstractmethod
    def run(self, embeds: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, batch: Batch, **extra: Any) -> Any:
        """The understanding model over embeddings [B, S, d]: an output with `last_hidden_state` after the final norm.

        mask [B, all tokens so far]; extra holds the injection and, in decoding, cache arguments.
        """

    @abstractmethod
    def head(self, states: torch.Tensor) -> torch.Tensor:
        """States after the final norm [..., d] → logits [..., V]."""

    @abstractmethod
    def gtoken_positions(self, batch: Batch, grid: Grid) -> torch.Tensor:
        """Rotary positions [n, rows·columns] of tokens that lie on `grid` over each image: its visual tokens' own."""

    @abstractmethod
    def rotary(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [B, heads, T, head_dim] by the understanding model's rotary embedding at positions [B, T]."""

    @abstractmethod
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the understanding model's linear modules that get adapters."""

    @abstractmethod
    def decode_text(self, ids: Sequence[int]) -> str:
        """Token ids → text without special tokens."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write a checkpoint folder that `load_backbone` reads back."""

    @property
    @abstractmethod
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def _prepare(self) -> None:
        """Freeze and listen to the layers; a subclass calls it once, when its parts are in place."""
        self.requires_grad_(False)
        self.train(False)
        for index, layer in enumerate(self.layers()):
            layer.register_forward_hook(partial(_after, index), with_kwargs=True)

    def train(self, mode: bool = True) -> "Adapter":
        """Only the understanding model changes mode: the visual pathways are never in train mode."""
        super().train(False)
        self.understanding_model().train(mode)
        return self

    def checkpoint_layers(self, on: bool) -> None:
        """Recompute understanding layers in the backward pass (in train mode)."""
        model = self.understanding_model()
        if on:  # reentrant checkpoints would cut the gradient to G, which is no positional argument of a layer
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()

    def forward(
        self,
        batch: Batch,
        understanding: torch.Tensor,
        injection: BoundInjection | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, S, V], or [A, V] of the A columns where `keep` [B, S] is true (row by row).

        understanding: U [n, Nu, d] of the rows that have an image.
        """
        visual = understanding if injection is None else injection.visual(understanding)
        lookup = None if injection is None else injection.queries(batch.positions, batch.text, batch.visual)
        extra = {} if lookup is None else {KEYWORD: lookup}
        out = self.run(self.embed(batch, visual), batch.mask, batch.positions, batch, use_cache=False, **extra)
        states = out.last_hidden_state
        return self.head(states if keep is None else states[keep])

    @torch.no_grad()
    def generate(
        self,
        batch: Batch,
        understanding: torch.Tensor,
        injection: BoundInjection | None = None,
        max_new_tokens: int = 32,
    ) -> list[list[int]]:
        """Greedy continuation of left-padded prompts, a list of token ids a row, without the end token.

        Keys and values of the sequence are cached; G was projected when it was bound and is not projected again.
        """
        if bool((~batch.mask[:, -1]).any()):
            raise ValueError("generate wants a batch padded on the left: build_batch(…, pad='left')")
        training = self.understanding_model().training
        self.train(False)  # checkpointed layers in train mode drop the cache
        try:
            return self._decode(batch, understanding, injection, max_new_tokens)
        finally:
            self.train(training)

    def _decode(
        self, batch: Batch, understanding: torch.Tensor, injection: BoundInjection | None, limit: int
    ) -> list[list[int]]:
        visual = understanding if injection is None else injection.visual(understanding)
        embeds, mask, positions = self.embed(batch, visual), batch.mask, batch.positions
        text, seen, cache = batch.text, batch.visual, None
        ended = torch.zeros(len(embeds), dtype=torch.bool, device=embeds.device)
        ends = torch.tensor(self.end_ids, device=embeds.device)
        found: list[list[int]] = [[] for _ in range(len(embeds))]
        for _ in range(limit):
            lookup = None if injection is None else injection.queries(positions, text, seen)
            extra = {} if lookup is None else {KEYWORD: lookup}
            out = self.run(embeds, mask, positions, batch, use_cache=True, past_key_values=cache, **extra)
            cache = out.past_key_values
            token = self.head(out.last_hidden_state[:, -1]).argmax(-1)
            ended |= torch.isin(token, ends)
            if bool(ended.all()):
                break
            for row in (~ended).nonzero()[:, 0].tolist():
                found[row].append(int(token[row]))
            positions = positions[:, -1:] + 1
            text, seen = torch.ones_like(positions, dtype=torch.bool), torch.zeros_like(positions, dtype=torch.bool)
            mask = torch.cat([mask, text], 1)
            step = replace(batch, ids=token[:, None], visual=seen, image_rows=batch.image_rows[:0])
            embeds = self.embed(step, visual[:0])
        return found
