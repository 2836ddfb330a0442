"""One training sample as a small picture, for the table of rollouts. Needs Pillow alone."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

BLUE = "#0072B2"


def draw_sample(
    image: Image.Image, boxes: Sequence[Sequence[float]], readout: Sequence[float] | None, side: int = 256
) -> Image.Image:
    """A training sample as a picture: the image with its ROI boxes, and a bar per latent's readout weight beneath.

    boxes: normalised (x0, y0, x1, y1). readout: K non-negative weights, None draws no bars. side: longer edge in px.
    """
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    smooth = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
    bars = 0 if readout is None else side // 4
    out = Image.new("RGB", (size[0], size[1] + bars), "white")
    out.paste(image.convert("RGB").resize(size, smooth))
    draw = ImageDraw.Draw(out)
    for x0, y0, x1, y1 in boxes:
        frame = (x0 * size[0], y0 * size[1], x1 * size[0] - 1, y1 * size[1] - 1)
        draw.rectangle(frame, outline="black", width=4)
        draw.rectangle(frame, outline="white", width=2)
    if readout is not None and len(readout):
        weights = np.asarray(readout, dtype=float)
        top, step = max(weights.max(), 1e-12), size[0] / len(weights)
        for i, w in enumerate(weights):
            height = (bars - 8) * max(w, 0) / top
            box = (i * step + step * 0.15, out.height - 1 - height, (i + 1) * step - step * 0.15, out.height - 1)
            draw.rectangle(box, fill=BLUE)
    return out
