"""A checkpoint taken apart for training: the root that DeepSpeed shards, and the frozen tower beside it."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launch.errors import UserError
from launch.staging import staged
from realvr.config import LoraSettings, ModelSettings
from realvr.families import family_of
from realvr.families.base import Family, VisualFeatures
from realvr.policy.attention import NAME
from realvr.policy.kv import KVView
from realvr.policy.logprobs import VocabularyHead

_ADAPTER = "default"


class PolicyRoot(nn.Module):
    """What trains: the language model (embeddings, layers, final norm) and the output head. No vision in it.

    Parameter names are `language_model.…` and `lm_head.weight`; `Policy.checkpoint_name` maps them to a checkpoint's.
    """

    def __init__(self, language_model: nn.Module, lm_head: nn.Module):
        super().__init__()
        self.language_model = language_model
        self.lm_head = lm_head if isinstance(lm_head, VocabularyHead) else VocabularyHead(lm_head)
        self._checkpointed = [m for m in language_model.modules() if hasattr(m, "gradient_checkpointing")]
        for module in self._checkpointed:
            module.gradient_checkpointing = False
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    @property
    def layers(self) -> int:
        return self.language_model.config.num_hidden_layers

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings: ids Long [...] → [..., d]."""
        return self.language_model.get_input_embeddings()(ids)

    def run(
        self, embeds: torch.Tensor, positions: torch.Tensor, view: KVView, recompute: bool = False, **extra: Any
    ) -> torch.Tensor:
        """One forward under a KV view: embeds [B, S, d], positions [3, B, S] → states after the final norm [B, S, d].

        recompute: layers keep no activations and are computed again in the backward pass (train mode only).
        """
        if self.language_model.rotary_emb.inv_freq.dtype not in (torch.float32, torch.float64):
            raise ValueError("rotary frequencies were rounded: the engine must keep inv_freq in float32")
        # A four-dimensional mask is taken as made, so no family builds one; the attention function reads the plan.
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=embeds.device)
        with self._recompute(recompute):
            out = self.language_model(
                inputs_embeds=embeds,
                position_ids=positions,
                attention_mask=unused,
                use_cache=False,
                tree=view,
                **extra,
            )
        return out.last_hidden_state

    @contextmanager
    def _recompute(self, on: bool) -> Iterator[None]:
        for module in self._checkpointed:
            module.gradient_checkpointing = on
        try:
            yield
        finally:
            for module in self._checkpointed:
                module.gradient_checkpointing = False


@dataclass
class Policy:
    """root: trained, for the engine. tower: frozen, one copy a rank, outside the root. config: the model's own."""

    family: Family
    config: Any
    root: PolicyRoot
    tower: nn.Module
    settings: ModelSettings

    @property
    def vocabulary(self) -> int:
        """Width of the output layer."""
        return self.root.lm_head.vocabulary

    @torch.no_grad()
    def visual_features(self, pixels: torch.Tensor, grid_thw: torch.Tensor) -> VisualFeatures:
        """Merger outputs of images: pixels [patches, c], grid_thw [images, 3] → features on the tower's device."""
        device = next(self.tower.parameters()).device
        return self.family.visual_features(self.tower, pixels.to(device), grid_thw.to(device))

    def checkpoint_name(self, name: str) -> str:
        """A root parameter's name in a saved checkpoint; adapters have none (see `checkpoint_tensors`)."""
        part, _, rest = name.partition(".")
        prefixes = self.family.checkpoint_prefixes()
        if part not in prefixes or not rest:
            raise ValueError(f"{name!r} is no parameter of the policy root")
        return prefixes[part] + rest.replace(".base_layer.", ".")

    def checkpoint_tensors(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Root tensors (name, whole tensor) → a checkpoint's (name, tensor), adapters merged into their base weight.

        A base weight waits for its two adapter factors and nothing else does, so a stream stays a stream. ValueError if
        a factor or a base never comes.
        """
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in named:
            module, piece = _lora_piece(name)
            if module is None:
                yield self.checkpoint_name(name), tensor
                continue
            pieces = waiting.setdefault(module, {})
            pieces[piece] = tensor
            if len(pieces) == 3:
                merged = _merge(pieces, self.settings.lora)
                del waiting[module]
                yield self.checkpoint_name(f"{module}.weight"), merged
        if waiting:
            raise ValueError(f"adapter pieces are missing for {', '.join(sorted(waiting)[:3])}")

    def tower_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The frozen part's (checkpoint name, tensor), for an export."""
        prefix = self.family.checkpoint_prefixes()["tower"]
        for name, tensor in self.tower.state_dict().items():
            yield prefix + name, tensor


def _lora_piece(name: str) -> tuple[str | None, str]:
    """`….q_proj.lora_A.default.weight` → (`….q_proj`, `A`); a plain parameter gives (None, "")."""
    for marker, piece in ((f".lora_A.{_ADAPTER}.", "A"), (f".lora_B.{_ADAPTER}.", "B"), (".base_layer.weight", "W")):
        if marker in name:
            return name.split(marker)[0], piece
    return None, ""


def _merge(pieces: dict[str, torch.Tensor], lora: LoraSettings) -> torch.Tensor:
    """W + alpha/r · B·A, computed in float32 and returned in W's type."""
    update = pieces["B"].float() @ pieces["A"].float() * (lora.alpha / lora.r)
    return (pieces["W"].float() + update).to(pieces["W"].dtype)


def load_policy(
    model: ModelSettings, device: torch.device | str = "cpu", context: AbstractContextManager | None = None
) -> Policy:
    """Load a checkpoint and take it apart: tower frozen, language model and head trainable (or adapters only).

    context: entered around the loading, for example `deepspeed.zero.Init(…)`, for models that no process can hold
    whole; its configuration must keep `inv_freq` in float32 and the tower's parameters gathered afterwards. UserError
    if the checkpoint cannot be read, lacks weights, or uses sliding windows.
    """
    family = family_of(model.path)
    with context or nullcontext():
        whole = _load(model)
    parts = family.parts(whole)
    _check_text(parts.language_model, model.path)
    parts.language_model.config._attn_implementation = NAME
    parts.tower.requires_grad_(False).eval()
    root = PolicyRoot(parts.language_model, parts.lm_head)
    if model.lora is not None:
        _add_adapters(root, model.lora)
    root.to(device).train()
    return Policy(family, whole.config, root, parts.tower.to(device), model)


def _load(model: ModelSettings) -> nn.Module:
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        whole, report = AutoModelForImageTextToText.from_pretrained(
            staged(model.path), dtype=getattr(torch, model.dtype), attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{model.path}: the model cannot be loaded ({reason}); restore the checkpoint") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"{model.path}: {len(missing)} weights are missing, {missing[0]} first; the files do not fit config.json: "
            f"restore the checkpoint"
        )
    return whole


def _check_text(language_model: nn.Module, path: str) -> None:
    config = language_model.config
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(f"{path}: config.json asks for sliding-window attention; set use_sliding_window to false")
    if getattr(config, "attention_dropout", 0.0):
        raise UserError(f"{path}: attention_dropout is {config.attention_dropout}; set it to 0 to train with latents")


def _add_adapters(root: PolicyRoot, lora: LoraSettings) -> None:
    """Freeze the root and put peft's LoRA layers (dropout 0, type of the base weight) on the language model."""
    from peft import LoraConfig, inject_adapter_in_model

    root.requires_grad_(False)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0)
    dtype = next(root.language_model.parameters()).dtype
    inject_adapter_in_model(config, root.language_model, adapter_name=_ADAPTER)
    trainable = [p for name, p in root.named_parameters() if "lora_" in name]
    for parameter in trainable:
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(True)
    if not trainable:
        raise UserError(f"model.lora.targets: no module of the language model is named {', '.join(lora.targets)}")


@contextmanager
def adapters_off(root: PolicyRoot) -> Iterator[None]:
    """The starting policy of a LoRA run: inside, adapters are skipped."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in root.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
