"""What one model family is: everything that differs between families stands in its file here, and nowhere else."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from launch.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

START, LATENT, END = "<|lvr_start|>", "<|lvr|>", "<|lvr_end|>"
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class TokenIds:
    """Ids the latent grammar needs. `banned` may never be sampled (image and video placeholders, vision start)."""

    start: int
    latent: int
    end: int
    image: int
    pad: int
    eos: tuple[int, ...]
    banned: tuple[int, ...]


@dataclass(frozen=True)
class VisualFeatures:
    """Merger outputs as inserted into the text sequence: embeds [N, d]; deepstack: one [N, d] per injected layer."""

    embeds: "torch.Tensor"
    deepstack: tuple["torch.Tensor", ...] = ()


@dataclass(frozen=True)
class ModelParts:
    """The pieces a learner trains (language_model, lm_head) and the frozen tower (vision encoder and merger)."""

    language_model: "nn.Module"
    lm_head: "nn.Module"
    tower: "nn.Module"


def generation_eos(model_path: str) -> tuple[int, ...]:
    """Further ids that end a completion, from the folder's generation_config.json (vLLM stops at them too)."""
    file = Path(model_path) / "generation_config.json"
    if not file.is_file():
        return ()
    eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


class Family(ABC):
    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]  # as in config.json
    vllm_model: ClassVar[str]  # "module:Class" of vLLM's implementation
    moe_leaves: ClassVar[tuple[str, ...]] = ()  # classes ZeRO-3 must fetch whole
    vision_tokens: ClassVar[tuple[str, ...]] = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")

    def token_ids(self, tokenizer: Any, model_path: str) -> TokenIds:
        """Look up every special id; a missing one stops the run (a default would silently train on nothing)."""
        vocabulary = tokenizer.get_vocab()
        missing = [t for t in (START, LATENT, END, *self.vision_tokens) if t not in vocabulary]
        if missing:
            raise UserError(
                f"{model_path}: the tokenizer lacks {', '.join(missing)}; a latent model needs each as one token: "
                f"add them with `realvr add-tokens` or start from a checkpoint that has them"
            )
        if tokenizer.eos_token_id is None:
            raise UserError(f"{model_path}: the tokenizer has no eos_token; set it in tokenizer_config.json")
        eos = dict.fromkeys([tokenizer.eos_token_id, *generation_eos(model_path)])
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ids = {t: vocabulary[t] for t in (START, LATENT, END, *self.vision_tokens)}
        return TokenIds(
            start=ids[START],
            latent=ids[LATENT],
            end=ids[END],
            image=ids[self.vision_tokens[0]],
            pad=pad,
            eos=tuple(eos),
            banned=tuple(ids[t] for t in self.vision_tokens),
        )

    def reserved_tokens(self, tokenizer: Any) -> tuple[str, ...]:
        """Strings that become control tokens wherever they are typed: data must not contain them."""
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        return tuple(dict.fromkeys([*special, START, LATENT, END, *self.vision_tokens]))

    @abstractmethod
    def parts(self, model: "nn.Module") -> ModelParts:
        """Take a transformers model apart. `names` of parameters: see `checkpoint_prefixes`."""

    @abstractmethod
    def checkpoint_prefixes(self) -> dict[str, str]:
        """Prefix of each part's parameters in a saved checkpoint, by field of ModelParts."""

    @abstractmethod
    def visual_features(self, tower: "nn.Module", pixels: "torch.Tensor", grid_thw: "torch.Tensor") -> VisualFeatures:
        """pixels [patches, c], grid_thw [images, 3] (t, h, w in patches) → features of all images, concatenated."""

    @abstractmethod
    def positions(self, config: Any, input_ids: "torch.Tensor", grid_thw: "torch.Tensor") -> tuple["torch.Tensor", int]:
        """M-RoPE positions [3, P] of one unpadded prompt [P], and the position of the token after it."""

    @abstractmethod
    def language_inputs(self, features: VisualFeatures, visual_mask: "torch.Tensor") -> dict[str, Any]:
        """Extra keyword arguments of the language model (deepstack); visual_mask bool [B, T] marks image tokens."""

    @abstractmethod
    def merged_grid(self, config: Any, grid_thw: tuple[int, int, int]) -> tuple[int, int, int]:
        """(patch rows h, patch columns w, merge m) of one image; its tokens form an (h/m) × (w/m) row-major grid."""

    @abstractmethod
    def image_unit(self, processor: Any) -> int:
        """Side in pixels of the square that one visual token covers."""

    @abstractmethod
    def processor_kwargs(self, processor: Any, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Arguments that bound an image's visual tokens, for the image processor and vLLM's `mm_processor_kwargs`."""

    @abstractmethod
    def tiny(self, folder: str, size: str, seed: int) -> None:
        """Write a tiny random checkpoint to the empty or new `folder`: model, tokenizer with latent tokens, processor.

        size: `test` (parity checks) or `demo` (the smallest that learns the generated worlds).
        """
