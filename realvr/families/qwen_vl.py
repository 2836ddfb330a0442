"""What the Qwen-VL families share: module layout, M-RoPE positions of still images, and the merged patch grid."""

from itertools import groupby
from typing import TYPE_CHECKING, Any

from realvr.families.base import Family, ModelParts

if TYPE_CHECKING:
    import torch
    from torch import nn


class QwenVL(Family):
    """Base of the Qwen families with one vision tower, a patch merger and three-axis rotary positions."""

    def parts(self, model: "nn.Module") -> ModelParts:
        return ModelParts(language_model=model.model.language_model, lm_head=model.lm_head, tower=model.model.visual)

    def positions(self, config: Any, input_ids: "torch.Tensor", grid_thw: "torch.Tensor") -> tuple["torch.Tensor", int]:
        """Text counts up by one on all three axes; an image holds time still and spans rows and columns.

        The token after an image stands at the image's start plus its longer side in merged patches.
        """
        import torch

        merge = config.vision_config.spatial_merge_size
        grids = iter(grid_thw.tolist())
        pieces, here = [], 0
        for is_image, run in groupby((input_ids == config.image_token_id).tolist()):
            length = len(list(run))
            if not is_image:
                pieces.append(torch.arange(here, here + length).expand(3, -1))
                here += length
                continue
            _, rows, columns = next(grids)
            rows, columns = rows // merge, columns // merge
            row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
            pieces.append(torch.stack([torch.zeros_like(row), row, column]) + here)
            here += max(rows, columns)
        return torch.cat(pieces, dim=1).to(input_ids.device), here

    def merged_grid(self, config: Any, grid_thw: tuple[int, int, int]) -> tuple[int, int, int]:
        return int(grid_thw[1]), int(grid_thw[2]), config.vision_config.spatial_merge_size

    def image_unit(self, processor: Any) -> int:
        return processor.image_processor.patch_size * processor.image_processor.merge_size

    def processor_kwargs(self, processor: Any, min_tokens: int, max_tokens: int) -> dict[str, Any]:
        area = self.image_unit(processor) ** 2
        return {"size": {"shortest_edge": min_tokens * area, "longest_edge": max_tokens * area}}
