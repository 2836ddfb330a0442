"""Every kind of picture file comes out upright RGB or is refused by name; sizes given out are never changed again."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from launch.errors import UserError
from realvr.data.images import MAX_RATIO, fit, image_size, load_image

WIDTH, HEIGHT = 64, 48


@pytest.fixture
def scene() -> Image.Image:
    """Left half red, right half blue, top eight rows green."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    pixels[:, :32], pixels[:, 32:], pixels[:8] = (200, 30, 20), (20, 40, 210), (30, 180, 40)
    return Image.fromarray(pixels)


def _close(picture: Image.Image, wanted: Image.Image, levels: int) -> bool:
    return picture.mode == "RGB" and int(np.abs(np.int16(picture) - np.int16(wanted)).mean()) <= levels


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation_is_applied(turn: int, scene: Image.Image, tmp_path: Path) -> None:
    stored = {
        1: scene,
        2: scene.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: scene.transpose(Image.Transpose.ROTATE_180),
        4: scene.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: scene.transpose(Image.Transpose.TRANSPOSE),
        6: scene.transpose(Image.Transpose.ROTATE_90),
        7: scene.transpose(Image.Transpose.TRANSVERSE),
        8: scene.transpose(Image.Transpose.ROTATE_270),
    }[turn]
    exif = Image.Exif()
    exif[0x0112] = turn
    stored.save(tmp_path / "a.png", exif=exif)
    assert image_size(str(tmp_path / "a.png")) == (WIDTH, HEIGHT)
    assert load_image(str(tmp_path / "a.png")).tobytes() == scene.tobytes()


def test_broken_exif_keeps_the_picture(scene: Image.Image, tmp_path: Path) -> None:
    scene.save(tmp_path / "a.jpg", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff", quality=95)
    assert _close(load_image(str(tmp_path / "a.jpg")), scene, 4)


def test_modes(scene: Image.Image, tmp_path: Path) -> None:
    grey = scene.convert("L")
    deep = Image.fromarray(np.uint16(grey) * 257)
    cases = {
        "grey.png": (grey, grey.convert("RGB")),
        "bits.png": (grey.convert("1"), grey.convert("1").convert("RGB")),
        "palette.png": (scene.quantize(4), scene),
        "deep.png": (deep, grey.convert("RGB")),
        "deep.tiff": (deep, grey.convert("RGB")),
        "cmyk.jpg": (scene.convert("CMYK"), scene),
        "grey_alpha.png": (grey.convert("LA"), grey.convert("RGB")),
    }
    for name, (image, wanted) in cases.items():
        image.save(tmp_path / name)
        assert _close(load_image(str(tmp_path / name)), wanted, 6), name
    assert set(np.unique(np.array(load_image(str(tmp_path / "bits.png"))))) == {0, 255}


def test_transparency_lies_on_white(scene: Image.Image, tmp_path: Path) -> None:
    alpha = np.full((HEIGHT, WIDTH), 255, dtype=np.uint8)
    alpha[:, :32] = 0
    hidden = scene.copy()
    hidden.putalpha(Image.fromarray(alpha))
    hidden.save(tmp_path / "rgba.png")
    palette = scene.quantize(4)
    palette.info["transparency"] = palette.getpixel((0, 40))  # the red of the left half
    palette.save(tmp_path / "palette.png", transparency=palette.getpixel((0, 40)))
    for name in ("rgba.png", "palette.png"):
        pixels = np.array(load_image(str(tmp_path / name)))
        assert (pixels[8:, :32] == 255).all(), name
        assert pixels[8:, 32:, 2].mean() > 200 and pixels[8:, 32:, 0].mean() < 40, name


def test_first_frame(scene: Image.Image, tmp_path: Path) -> None:
    scene.save(tmp_path / "a.gif", save_all=True, append_images=[Image.new("RGB", scene.size, "white")] * 2)
    assert _close(load_image(str(tmp_path / "a.gif")), scene, 6)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, *extra: bytes) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + _chunk(b"IDAT", zlib.compress(b"\x00")) + _chunk(b"IEND", b"")
    )


def test_bad_files_are_named(scene: Image.Image, tmp_path: Path) -> None:
    scene.save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    text_bomb = _chunk(b"zTXt", b"note\x00\x00" + zlib.compress(b"x" * 3_000_000))
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "float.tiff")
    cases = {
        "missing.png": (None, "no such file"),
        "empty.jpg": (b"", "is empty"),
        "cut.jpg": (whole[: len(whole) - 40], "truncated"),
        "words.png": (b"these are words, not a picture", "not a picture"),
        "huge.png": (_png(20000, 20000), "400000000 pixels .* before decoding"),
        "large.png": (_png(10000, 10000), "100000000 pixels .* before decoding"),
        "text.png": (_png(8, 8, text_bomb), "too large"),
        "float.tiff": ((tmp_path / "float.tiff").read_bytes(), "no range"),
    }
    for name, (content, wanted) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=wanted) as caught:
            load_image(str(tmp_path / name), "q7")
        assert str(caught.value).startswith("record q7: image ") and name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_recipes_are_rendered() -> None:
    for ref in ("shapes:0.0.1|circle.red.1.2.2|-|-|square.blue.0.1.1", "digits:0.0.1|-|0.red.0.2.2|-|-"):
        picture = load_image(ref)
        assert picture.size == image_size(ref) == (64, 64) and picture.mode == "RGB"


def _same_as_qwen(width: int, height: int, unit: int, least: int, most: int) -> tuple[int, int]:
    return smart_resize(height, width, unit, least * unit * unit, most * unit * unit)[::-1]


@given(st.integers(30, 3000), st.integers(30, 3000), st.sampled_from([16, 28, 32]))
def test_ordinary_pictures_get_the_processors_own_size(width: int, height: int, unit: int) -> None:
    if max(width, height) < 20 * min(width, height):
        assert fit(width, height, unit, 4, 2560) == _same_as_qwen(width, height, unit, 4, 2560)


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 40), st.integers(0, 60), st.sampled_from([16, 28]))
def test_any_picture_fits_the_bounds_and_stays(width: int, height: int, least: int, extra: int, unit: int) -> None:
    most = least + extra
    size = fit(width, height, unit, least, most)
    columns, rows = (side // unit for side in size)
    assert least <= columns * rows <= most and min(columns, rows) >= 1
    assert max(columns, rows) <= MAX_RATIO * min(columns, rows)
    assert all(side % unit == 0 for side in size)
    assert fit(*size, unit, least, most) == size == _same_as_qwen(*size, unit, least, most)


def test_extreme_pictures_stay_long() -> None:
    assert fit(2000, 10, 28, 4, 2560) == (71 * 28, 28)
    assert fit(70, 1540, 28, 4, 16) == (28, 16 * 28)
    assert fit(50000, 1, 28, 4, 2560) == (200 * 28, 28)
