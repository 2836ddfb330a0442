"""Coloured shapes on a noisy ground: circle, square, triangle, cross in five colours."""

from functools import lru_cache

import numpy as np
from PIL import Image

from launch.errors import UserError
from realvr.data.sources.scenes import HALF, SceneWorld, paint, read_recipe

SHAPES = ("circle", "square", "triangle", "cross")
_RADII = (8.0, 9.5, 11.0)  # pixels


class Shapes(SceneWorld):
    """Scenes of shapes. A look is (size 0–2, shift down 0–4, shift right 0–4)."""

    prefix = "shapes"
    noun_word = "shape"

    @property
    def nouns(self) -> tuple[str, ...]:
        return SHAPES

    def look(self, rng: np.random.Generator, noun: str) -> tuple[int, ...]:
        return tuple(int(n) for n in rng.integers((len(_RADII), 5, 5)))


def render(ref: str) -> Image.Image:
    """Draw a `shapes:…` recipe: RGB, 64 × 64, the same pixels every time. A bad recipe raises UserError."""
    scene = read_recipe(ref, Shapes.prefix)
    try:
        masks = [None if c is None else _mask(c.noun, *c.look) for c in scene.cells]
    except (TypeError, IndexError, KeyError):
        raise UserError(
            f"image {ref!r}: unknown shape or look; shapes are {', '.join(SHAPES)} with size 0–2 and two shifts 0–4"
        ) from None
    return paint(scene, masks)


@lru_cache(maxsize=512)
def _mask(shape: str, size: int, down: int, right: int) -> np.ndarray:
    """Coverage [32, 32], 0 or 1; shifts move the centre by up to 3 pixels."""
    if not (0 <= size < len(_RADII) and 0 <= down < 5 and 0 <= right < 5):
        raise IndexError
    r = _RADII[size]
    y, x = np.mgrid[:HALF, :HALF] + 0.5 - HALF / 2
    y, x = y - 1.5 * (down - 2), x - 1.5 * (right - 2)
    arm = 0.36 * r
    inside = {
        "circle": x**2 + y**2 <= r**2,
        "square": (abs(x) <= 0.86 * r) & (abs(y) <= 0.86 * r),
        "triangle": (y <= 0.8 * r) & (y >= -r) & (abs(x) <= 0.6 * (y + r)),
        "cross": ((abs(x) <= arm) & (abs(y) <= r)) | ((abs(y) <= arm) & (abs(x) <= r)),
    }
    return inside[shape].astype(float)
