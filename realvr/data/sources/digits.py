"""Real handwriting in coloured scenes: the 8 × 8 digits that scikit-learn ships, as ink in the quadrants.

The 1,797 images stand writer after writer (every writer filled the same form, so forms can be told apart). The first
ten writers are for training, the last four for validation: no writer is in both.
"""

from functools import lru_cache

import numpy as np
from PIL import Image

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.sources.scenes import HALF, SceneWorld, Thing, paint, read_recipe

DIGITS = tuple("0123456789")
SPLITS = {"train": range(0, 1287), "validation": range(1287, 1797)}  # image 1287 begins the eleventh writer's form
_INK = 24  # pixels of an upscaled digit; shifts move it by up to 3 around the centre


class Digits(SceneWorld):
    """Scenes of handwritten digits. A look is (image of the collection, shift down 0–4, shift right 0–4)."""

    prefix = "digits"
    noun_word = "digit"

    def __init__(self, settings: SourceSettings):
        super().__init__(settings)
        labels = _handwriting()[1]
        split = SPLITS[self.options.split]
        self._images = {d: np.array([i for i in split if labels[i] == int(d)]) for d in DIGITS}

    @property
    def nouns(self) -> tuple[str, ...]:
        return DIGITS

    def look(self, rng: np.random.Generator, noun: str) -> tuple[int, ...]:
        image = rng.choice(self._images[noun])
        return (int(image), *(int(n) for n in rng.integers((5, 5))))


def render(ref: str) -> Image.Image:
    """Draw a `digits:…` recipe: RGB, 64 × 64, the same pixels every time. A bad recipe raises UserError."""
    scene = read_recipe(ref, Digits.prefix)
    count = len(_handwriting()[1])
    if not all(c is None or _possible(c) for c in scene.cells):
        raise UserError(
            f"image {ref!r}: unknown look, or not the digit of that image; a cell should be "
            f"DIGIT.COLOUR.IMAGE.DOWN.RIGHT with IMAGE 0–{count - 1} showing DIGIT and shifts 0–4"
        )
    return paint(scene, [None if c is None else _mask(*c.look) for c in scene.cells])


def _possible(thing: Thing) -> bool:
    labels = _handwriting()[1]
    if len(thing.look) != 3:
        return False
    image, down, right = thing.look
    return down < 5 and right < 5 and image < len(labels) and thing.noun == str(labels[image])


@lru_cache(maxsize=1)
def _handwriting() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8] in 0–16 and labels [1797]."""
    from sklearn.datasets import load_digits  # slow to import, and only this world needs it

    data = load_digits()
    return data.images, data.target


@lru_cache(maxsize=4096)
def _mask(image: int, down: int, right: int) -> np.ndarray:
    """Coverage [32, 32] in 0–1 of an upscaled digit."""
    grey = Image.fromarray(np.uint8(_handwriting()[0][image] * 255 / 16))
    ink = np.asarray(grey.resize((_INK, _INK), Image.Resampling.BICUBIC), dtype=float) / 255
    margin = (HALF - _INK) // 2
    top, left = margin + round(1.5 * (down - 2)), margin + round(1.5 * (right - 2))
    mask = np.zeros((HALF, HALF))
    mask[top : top + _INK, left : left + _INK] = ink
    return mask
