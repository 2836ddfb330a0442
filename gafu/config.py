"""Settings of the GAFU jobs' parts. Every default is the paper's where the paper has a value."""

from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from launch.config import Settings


class BackboneSettings(Settings):
    path: str
    """Checkpoint of a unified multimodal model: a local folder. Its config.json selects the adapter."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the frozen weights."""
    gradient_checkpointing: bool = True
    """Recompute understanding layers in the backward pass; gradients are the same with it off."""


class GTokenSettings(Settings):
    width: int = Field(default=1024, ge=4)
    """Width of encoder and decoder."""
    layers: int = Field(default=6, ge=1)
    """Layers of the encoder, and of the decoder."""
    heads: int = Field(default=8, ge=1)
    """Attention heads; width / heads must be a multiple of 4 (two axes, rotated in pairs)."""
    ffn: int = Field(default=4096, ge=1)
    """Inner width of the feed-forward part."""
    grid: tuple[int, int] = (16, 16)
    """Rows and columns of the G tokens: 256 learned queries."""
    rope_base: float = Field(default=10_000.0, gt=1)
    """Base of the 2-D rotary positions; 10 lets a short training learn routing."""
    locality: float = Field(default=0.0, ge=0)
    """Attention score that a token gives its own place at the start (equal biases on q and k); 0 starts uniform."""

    @model_validator(mode="after")
    def _head_dim(self) -> "GTokenSettings":
        if self.width % (4 * self.heads):
            raise ValueError(f"width {self.width} over {self.heads} heads is no multiple of 4; change width or heads")
        return self


class AlignmentSettings(Settings):
    rec: float = Field(default=1.0, ge=0)
    """λ_rec: weight of the reconstruction loss."""
    spa: float = Field(default=1.0, ge=0)
    """λ_spa: weight of the loss that binds G tokens to their cell of the generation latents."""
    rel: float = Field(default=1.0, ge=0)
    """λ_rel: weight of the loss that aligns the relations among G tokens with those among U tokens."""
    l2: float = Field(default=0.5, ge=0)
    """Weight of the squared error beside the absolute one in the reconstruction loss."""
    lpips: float = Field(default=0.5, ge=0)
    """Weight of LPIPS in the reconstruction loss; 0 needs no LPIPS weights."""
    lpips_weights: str | None = None
    """File with LPIPS (VGG16) weights; None looks for torchvision's VGG16 in the local cache."""
    lpips_random: bool = False
    """Allow an untrained LPIPS trunk when no weights are found (tests and demos)."""
    scales: tuple[int, ...] = Field(default=(4, 8, 16), min_length=1)
    """Sides of the grids on which relations are compared."""


class LoraSettings(Settings):
    r: int = Field(default=16, ge=1)
    """Rank of the adapters on the understanding path."""
    alpha: int = Field(default=16, ge=1)
    """Scale: the update is alpha/r · B·A."""


class InjectionSettings(Settings):
    kind: Literal["none", "text", "visual", "entry", "concat"] = "text"
    """How G reaches the understanding path: `text` states look it up after layers (the paper); `visual` states do;
    `entry` adds it to U once; `concat` appends it to U in the sequence; `none` is same-data SFT."""
    layers: Literal["all", "sparse"] | tuple[int, ...] = "all"
    """After which layers: all but the last, `sparse_count` of them spread evenly, or a list (from 0)."""
    sparse_count: int = Field(default=10, ge=1)
    """Layers of the sparse mode."""
    heads: int | None = Field(default=None, ge=1)
    """Attention heads of a lookup (of the backbone's head size); None takes the backbone's number."""
    key_positions: Literal["native", "learned", "both"] = "native"
    """Places of G in a lookup: the image's rotary positions, learned row and column embeddings, or both."""
    lora: LoraSettings | None = LoraSettings()
    """Adapters on the understanding path; None trains none."""


class PreferenceSettings(Settings):
    ce: float = Field(default=5.0, ge=0)
    """Weight of the answer's cross-entropy in the matched branch."""
    dpo: float = Field(default=1.0, ge=0)
    """Weight of the preference for the matched over the shuffled G; 0 leaves it out."""
    beta: float = Field(default=0.1, gt=0)
    """β of the preference."""
    reduction: Literal["mean", "sum"] = "mean"
    """A sample's cross-entropy: mean or sum over its answer tokens."""
    kl_knots: tuple[tuple[int, float], ...] = ((0, 1.0), (2500, 0.25), (3750, 0.0))
    """(step, weight) knots of the KL to the reference, joined by lines; () leaves it out."""
    positive: float = Field(default=1.0, ge=0)
    """Weight of the preference's gradient through the matched branch."""
    negative: float = Field(default=0.25, ge=0)
    """Weight of the preference's gradient through the shuffled branch (4 : 1)."""
    cap: float | None = Field(default=0.25, gt=0)
    """Largest norm of the negative part relative to the positive's, after weighting; None never caps."""
    mask_probabilities: tuple[float, ...] = (0.8, 0.5, 0.2, 0.0)
    """Probability that a sample's U is replaced by the null embedding, phase by phase; the last one stays."""
    mask_phase: int = Field(default=1250, ge=1)
    """Steps of a phase."""

    @model_validator(mode="after")
    def _schedules(self) -> "PreferenceSettings":
        steps = [step for step, _ in self.kl_knots]
        if any(b <= a for a, b in pairwise(steps)):
            raise ValueError(f"kl_knots have steps {steps}; they should rise")
        if not self.mask_probabilities or any(not 0 <= p <= 1 for p in self.mask_probabilities):
            raise ValueError(f"mask_probabilities are {self.mask_probabilities}; give at least one, within 0 and 1")
        return self
