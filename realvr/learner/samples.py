"""Rows for the table of samples: what a few groups were asked, what they answered, which latents took the evidence."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from realvr.data.examples import Example
from realvr.data.images import image_size
from realvr.data.pictures import draw_sample
from realvr.data.prompts import PromptBuilder
from realvr.learner.batching import LearnerGroup


def sample_rows(
    groups: Sequence[LearnerGroup], weights: Sequence[list[float] | None], builder: PromptBuilder
) -> list[dict[str, Any]]:
    """One row a completion. weights: the evidence weights w [K] of each group, None where it took no evidence loss."""
    rows = []
    for group, weight in zip(groups, weights, strict=True):
        scored = group.scored
        example = scored.group.example
        picture = _picture(example, weight, builder)
        for i, rollout in enumerate(scored.group.rollouts):
            rows.append(
                {
                    "id": example.id,
                    "image": picture,
                    "question": example.question,
                    "answer": example.answer,
                    "completion": rollout.text,
                    "reward": float(scored.total[i]),
                    "advantage": float(scored.advantages[i]),
                    "wrong_answers": list(scored.wrong_answers),
                    "weights": weight,
                }
            )
    return rows


def _picture(example: Example, weight: list[float] | None, builder: PromptBuilder) -> Image.Image | None:
    """The first image with its ROI boxes and a bar per latent."""
    if not example.images:
        return None
    sizes = [image_size(ref, example.id) for ref in example.images]
    boxes = [box.coords for box, _ in builder.boxes(example, sizes) if box.image == 0]
    return draw_sample(builder.images(example)[0], boxes, weight)
