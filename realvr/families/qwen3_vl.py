"""Qwen3-VL (dense): deepstack adds features of earlier vision layers to the first decoder layers at image tokens."""

from typing import TYPE_CHECKING, Any, ClassVar

from realvr.families.base import VisualFeatures
from realvr.families.qwen_vl import QwenVL
from realvr.families.tiny import Size, config_ids, mrope_section, text_sizes, tiny_size, write

if TYPE_CHECKING:
    import torch
    from torch import nn


class Qwen3VL(QwenVL):
    name: ClassVar[str] = "qwen3_vl"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3VLForConditionalGeneration",)
    vllm_model: ClassVar[str] = "vllm.model_executor.models.qwen3_vl:Qwen3VLForConditionalGeneration"

    def checkpoint_prefixes(self) -> dict[str, str]:
        return {"language_model": "model.language_model.", "lm_head": "lm_head.", "tower": "model.visual."}

    def visual_features(self, tower: "nn.Module", pixels: "torch.Tensor", grid_thw: "torch.Tensor") -> VisualFeatures:
        out = tower(pixels.to(tower.dtype), grid_thw=grid_thw)
        return VisualFeatures(out.pooler_output, tuple(out.deepstack_features))

    def language_inputs(self, features: VisualFeatures, visual_mask: "torch.Tensor") -> dict[str, Any]:
        """The mask and one [N, d] tensor per injected layer; N must be the number of True in the mask."""
        if not features.deepstack:
            return {}
        return {"visual_pos_masks": visual_mask, "deepstack_visual_embeds": list(features.deepstack)}

    def tiny(self, folder: str, size: str, seed: int) -> None:
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

        sizes: Size = tiny_size(size, patch=16)
        section = mrope_section(sizes.head_dim, interleaved=True)
        rope = {
            "rope_type": "default",
            "rope_theta": sizes.rope_theta,
            "mrope_section": section,
            "mrope_interleaved": True,
        }
        config = Qwen3VLConfig(
            text_config={**text_sizes(sizes), "head_dim": sizes.head_dim, "rope_parameters": rope},
            vision_config={
                "depth": sizes.vision_depth,
                "hidden_size": sizes.vision_hidden,
                "intermediate_size": 2 * sizes.vision_hidden,
                "num_heads": sizes.vision_heads,
                "out_hidden_size": sizes.hidden,
                "patch_size": sizes.patch,
                "spatial_merge_size": 2,
                "temporal_patch_size": sizes.temporal,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": list(range(sizes.vision_depth - 1)),
                "initializer_range": sizes.vision_hidden**-0.5,
            },
            tie_word_embeddings=False,
            **config_ids(),
        )
        write(folder, sizes, seed, config, Qwen3VLForConditionalGeneration, Qwen3VLProcessor)
