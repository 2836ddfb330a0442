"""References → RGB pictures, and the size that a picture is resized to so that no engine resizes it again."""

import logging
import math
import re
from io import BytesIO
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from launch.errors import UserError
from realvr.data import embedded

log = logging.getLogger(__name__)

MAX_PIXELS = 89_478_485  # Pillow's own warning level: 268 MB decoded
MAX_RATIO = 200  # the Qwen processors refuse longer strips
_COUNT = re.compile(r"\d+")
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_image(ref: str, record: str = "") -> Image.Image:
    """RGB picture of a path, a recipe (`shapes:…`, `digits:…`) or a picture inside a table (`table:…`): upright,
    transparency on white, first frame.

    Raises UserError naming file and record when it is missing, empty, cut short, not a picture, or a decompression
    bomb (checked before decoding).
    """
    kind = ref.split(":", 1)[0]
    if kind == "shapes":
        from realvr.data.sources import shapes

        return shapes.render(ref)
    if kind == "digits":
        from realvr.data.sources import digits

        return digits.render(ref)
    with _open(ref, record) as image:
        turn = _TURNS.get(_orientation(image, ref))
        try:
            picture = _to_rgb(image)
        except Exception as error:  # decoders raise anything on damaged bytes
            raise _unreadable(ref, record, str(error)) from error
    return picture.transpose(turn) if turn is not None else picture


def image_size(ref: str, record: str = "") -> tuple[int, int]:
    """(width, height) of the upright picture from its header, without decoding. Same errors as `load_image`."""
    if ref.split(":", 1)[0] in ("shapes", "digits"):
        from realvr.data.sources.scenes import SIZE

        return SIZE, SIZE
    with _open(ref, record) as image:
        turned = _orientation(image, ref) >= 5
        return image.size[::-1] if turned else image.size


def fit(width: int, height: int, unit: int, min_tokens: int, max_tokens: int) -> tuple[int, int]:
    """(width, height) in pixels that a picture is resized to: multiples of `unit`, min ≤ tokens ≤ max, ratio kept.

    The Qwen rule (round to the grid, then scale the area into the bounds) where its result respects them; for extreme
    pictures the allowed grid nearest in aspect ratio. A size given out here comes back unchanged.
    """
    area = unit * unit
    columns, rows = round(width / unit), round(height / unit)
    if columns * rows > max_tokens:
        shrink = math.sqrt(height * width / (max_tokens * area))
        columns, rows = (math.floor(side / shrink / unit) for side in (width, height))
    elif 0 < columns * rows < min_tokens:
        stretch = math.sqrt(min_tokens * area / (height * width))
        columns, rows = (math.ceil(side * stretch / unit) for side in (width, height))
    if not min_tokens <= columns * rows <= max_tokens or max(columns, rows) > MAX_RATIO * min(columns, rows):
        columns, rows = _nearest_grid(width / unit, height / unit, min_tokens, max_tokens)
    return columns * unit, rows * unit


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Bicubic, as the families' own processors do."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _nearest_grid(width: float, height: float, min_tokens: int, max_tokens: int) -> tuple[int, int]:
    """(columns, rows) with min ≤ columns·rows ≤ max and ratio ≤ 200, nearest to the sides (in tokens) when these are
    scaled into the bounds; nearest by the sum of both sides' log ratios."""
    area = width * height
    scale = math.sqrt(min(max(area, min_tokens), max_tokens) / area)
    width, height = width * scale, height * scale
    best, found = math.inf, None
    for rows in range(1, max_tokens + 1):
        least = max(math.ceil(min_tokens / rows), math.ceil(rows / MAX_RATIO))
        most = min(max_tokens // rows, rows * MAX_RATIO)
        if least > most:
            continue
        columns = min(max(round(width), least), most)
        distance = abs(math.log(columns / width)) + abs(math.log(rows / height))
        if distance < best:
            best, found = distance, (columns, rows)
    if found is None:
        raise UserError(f"model: no grid has {min_tokens} to {max_tokens} visual tokens; widen the bounds")
    return found


def _open(ref: str, record: str) -> Image.Image:
    source = _source(ref, record)
    try:
        image = Image.open(source)
    except Image.DecompressionBombError as error:
        raise _bomb(ref, record, _COUNT.findall(str(error))[0]) from error
    except UnidentifiedImageError as error:
        raise _unreadable(ref, record, "not a picture") from error
    except Exception as error:  # header parsers raise anything on damaged bytes
        raise _unreadable(ref, record, str(error)) from error
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        image.close()
        raise _bomb(ref, record, str(pixels))
    return image


def _source(ref: str, record: str) -> Path | BytesIO:
    if ref.startswith(embedded.PREFIX):
        content = embedded.read(ref)
        if not content:
            raise _unreadable(ref, record, "it has no bytes")
        return BytesIO(content)
    path = Path(ref)
    if not path.is_file():
        raise _unreadable(ref, record, "no such file", "check the path and image_root")
    if path.stat().st_size == 0:
        raise _unreadable(ref, record, "the file is empty")
    return path


def _orientation(image: Image.Image, ref: str) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception as error:  # a broken EXIF block must not cost the picture: it keeps its stored orientation
        log.warning("%s: EXIF unreadable (%s); taken as stored", ref, error)
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _to_8bit(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        colours = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")
    return image.convert("RGB")


def _to_8bit(image: Image.Image) -> Image.Image:
    """16-bit grey by its high byte: Pillow would clip it to white."""
    import numpy as np

    if image.mode == "F":
        raise ValueError("floating-point pixels have no range; save it with 8 or 16 bits")
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError("32-bit pixels outside 0–65535; save it with 8 or 16 bits")
    return Image.fromarray((values // 257).astype(np.uint8))


def _unreadable(ref: str, record: str, reason: str, remedy: str = "replace or drop it") -> UserError:
    where = f"record {record}: " if record else ""
    return UserError(f"{where}image {ref}: {reason}; it should be a readable picture; {remedy}")


def _bomb(ref: str, record: str, pixels: str) -> UserError:
    return _unreadable(ref, record, f"{pixels} pixels are above {MAX_PIXELS}, refused before decoding", "scale it down")
