"""Qwen2.5-VL: windowed vision tower, merger outputs go into the text sequence and nowhere else."""

from typing import TYPE_CHECKING, Any, ClassVar

from realvr.families.base import VisualFeatures
from realvr.families.qwen_vl import QwenVL
from realvr.families.tiny import Size, config_ids, mrope_section, text_sizes, tiny_size, write

if TYPE_CHECKING:
    import torch
    from torch import nn


class Qwen25VL(QwenVL):
    name: ClassVar[str] = "qwen2_5_vl"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLForConditionalGeneration",)
    vllm_model: ClassVar[str] = "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration"

    def checkpoint_prefixes(self) -> dict[str, str]:
        """transformers saves this family under its original names, without `language_model`."""
        return {"language_model": "model.", "lm_head": "lm_head.", "tower": "visual."}

    def visual_features(self, tower: "nn.Module", pixels: "torch.Tensor", grid_thw: "torch.Tensor") -> VisualFeatures:
        return VisualFeatures(tower(pixels.to(tower.dtype), grid_thw=grid_thw).pooler_output)

    def language_inputs(self, features: VisualFeatures, visual_mask: "torch.Tensor") -> dict[str, Any]:
        return {}

    def tiny(self, folder: str, size: str, seed: int) -> None:
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

        sizes: Size = tiny_size(size, patch=14)
        section = mrope_section(sizes.head_dim, interleaved=False)
        rope = {"rope_type": "default", "rope_theta": sizes.rope_theta, "mrope_section": section}
        config = Qwen2_5_VLConfig(
            text_config={**text_sizes(sizes), "rope_parameters": rope},
            vision_config={
                "depth": sizes.vision_depth,
                "hidden_size": sizes.vision_hidden,
                "intermediate_size": 2 * sizes.vision_hidden,
                "num_heads": sizes.vision_heads,
                "out_hidden_size": sizes.hidden,
                "patch_size": sizes.patch,
                "spatial_merge_size": 2,
                "temporal_patch_size": sizes.temporal,
                "window_size": sizes.window,
                "fullatt_block_indexes": [sizes.vision_depth - 1],
                "initializer_range": sizes.vision_hidden**-0.5,
            },
            tie_word_embeddings=False,
            **config_ids(),
        )
        write(folder, sizes, seed, config, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor)
