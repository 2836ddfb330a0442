"""Prompts: the same ids and pixels as the checkpoint's own processor, once resized, boxes on the right tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from launch.errors import UserError
from realvr.config import SourceSettings
from realvr.data.examples import Box, Example
from realvr.data.prompts import PromptBuilder, usable
from realvr.data.sources import open_source

SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture(scope="module")
def rows() -> dict[str, Example]:
    settings = SourceSettings(kind="jsonl", path=str(SAMPLES / "questions.jsonl"), box_space="pixel")
    return {e.id: e for e in open_source(settings)}


@pytest.fixture(scope="module", params=["tiny_qwen25", "tiny_qwen3"])
def builder(request: pytest.FixtureRequest) -> PromptBuilder:
    return PromptBuilder(request.getfixturevalue(request.param), 4, 40)


def _picture(folder: Path, width: int, height: int) -> str:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{width}x{height}.png")
    return str(folder / f"{width}x{height}.png")


def test_ids_and_pixels_equal_the_processors(builder: PromptBuilder, rows: dict[str, Example], tmp_path: Path) -> None:
    extreme = [
        Example(name, (_picture(tmp_path, width, height),), "What is it?", "x")
        for name, width, height in (("tall", 70, 1540), ("strip", 2000, 10), ("line", 64, 1), ("large", 1200, 900))
    ]
    for example in [*rows.values(), *extreme]:
        prompt, pictures = builder.build(example), builder.images(example)
        kwargs = {"images": pictures, **builder.processor_kwargs} if pictures else {}
        theirs = builder.processor(text=[builder.text(example)], return_tensors="pt", **kwargs)
        assert prompt.input_ids.tolist() == theirs["input_ids"][0].tolist(), example.id
        assert builder.length(example) == len(prompt.input_ids)
        if not pictures:
            assert prompt.pixels is None and prompt.grid_thw.shape == (0, 3) and not prompt.visual_mask.any()
            continue
        assert torch.equal(prompt.pixels, theirs["pixel_values"])
        assert torch.equal(prompt.grid_thw, theirs["image_grid_thw"])
        assert all(4 <= n <= 40 for n in prompt.image_counts)
        assert sum(prompt.image_counts) == int(prompt.visual_mask.sum())
        side = [(int(w) * builder.unit // 2, int(h) * builder.unit // 2) for _, h, w in prompt.grid_thw]
        assert [p.size for p in pictures] == side, "the processor resized a picture again"


def test_the_template_and_positions(builder: PromptBuilder, rows: dict[str, Example]) -> None:
    text = builder.text(rows["m1"])
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{vision}{vision}On which picture is a tree?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = builder.build(rows["m1"])
    first = int(prompt.visual_mask.nonzero()[0])
    assert prompt.positions[:, :first].tolist() == [list(range(first))] * 3
    assert prompt.positions[:, -1].tolist() == [prompt.next_position - 1] * 3
    assert prompt.positions.shape == (3, len(prompt.input_ids))


def _covered(prompt_roi: torch.Tensor, first: int, columns: int) -> set[tuple[int, int]]:
    return {divmod(int(token) - first, columns) for token in prompt_roi}


def test_boxes_land_on_their_own_image(builder: PromptBuilder, rows: dict[str, Example]) -> None:
    prompt = builder.build(rows["m1"])  # the box is on the second picture
    first, second = prompt.image_counts
    columns, lines = int(prompt.grid_thw[1, 2]) // 2, int(prompt.grid_thw[1, 1]) // 2
    assert len(prompt.roi) == 1 and prompt.roi[0].min() >= first and prompt.roi[0].max() < first + second
    cells = _covered(prompt.roi[0], first, columns)
    centre = (int(55 / 160 * lines), int(90 / 120 * columns))
    assert centre in cells and len(cells) < second
    swapped = replace(rows["m1"], boxes=(Box((20, 30, 70, 90), "pixel", 0),))
    assert builder.build(swapped).roi[0].max() < first
    assert len(builder.build(rows["w1"]).roi) == 2 and builder.build(rows["y2"]).roi == ()


def test_box_spaces_agree_after_the_resize(builder: PromptBuilder, rows: dict[str, Example]) -> None:
    yard = rows["y1"]  # 120 × 160: padded to a square it has 20 pixels left and right
    square = tuple((v + pad) / 160 for v, pad in zip((10, 100, 60, 150), (20, 0, 20, 0), strict=True))
    variants = [
        Box((10, 100, 60, 150), "pixel"),
        Box((10 / 120, 100 / 160, 0.5, 150 / 160)),
        Box((10 / 0.12, 100 / 0.16, 500, 150 / 0.16), "thousand"),
        Box(square, "square"),
    ]
    found = [builder.build(replace(yard, boxes=(box,))).roi[0].tolist() for box in variants]
    assert found[0] and found == [found[0]] * 4


def test_a_stated_size_of_another_shape_is_refused(builder: PromptBuilder, rows: dict[str, Example]) -> None:
    yard = rows["y1"]
    half = replace(yard, boxes=(Box((5, 50, 30, 75), "pixel"),), meta={"size": (60, 80)})  # annotated at half size
    assert builder.build(half).roi[0].tolist() == builder.build(yard).roi[0].tolist()
    turned = replace(yard, meta={"size": (160, 120)})
    with pytest.raises(UserError, match=r"record y1: it says 160x120 but .*yard.jpg is 120x160 upright"):
        builder.build(turned)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|lvr|>", "<|lvr_start|>", "<|im_end|>", "<|endoftext|>"])
def test_reserved_tokens_are_refused(builder: PromptBuilder, rows: dict[str, Example], token: str) -> None:
    for changes in ({"question": f"What does {token} mean?"}, {"answer": token}, {"options": ("a", f"b {token}")}):
        for read in (builder.build, builder.text, builder.length):
            with pytest.raises(UserError, match=r"record d1: the (question|answer|option B) contains") as caught:
                read(replace(rows["d1"], **changes))
            assert token in str(caught.value) and "\n" not in str(caught.value)


def test_usable_leaves_out_and_counts(builder: PromptBuilder, rows: dict[str, Example], tmp_path: Path) -> None:
    fine = [rows["d1"], rows["y1"], rows["t1"]]
    long = replace(rows["d1"], question="word " * 200)
    over = replace(rows["y1"], boxes=(Box((10, 100, 121, 150), "pixel"),))
    bad = [
        replace(rows["d1"], images=(str(tmp_path / "gone.png"),)),
        replace(rows["d1"], question="<|lvr|>"),
        replace(rows["d1"], boxes=(Box((0.1, 0.1, 2, 2)),)),
        replace(rows["d1"], boxes=(Box((0.1, 0.1, 0.2, 0.2), image=1),)),
    ]
    limit = max(builder.length(e) for e in (*fine, over))
    data = [fine[0], bad[0], fine[1], long, bad[1], over, bad[2], fine[2], bad[3]]
    indices, counts = usable(data, builder, limit, max_bad_records=4)
    assert indices == [0, 2, 5, 7] and counts == {"too_long": 1, "bad": 4, "clamped_boxes": 1}
    assert usable(fine, builder, limit - 1)[1]["too_long"] == 1
    with pytest.raises(UserError, match=r"record d1.*bad record 4, data.max_bad_records allows 3"):
        usable(data, builder, limit, max_bad_records=3)
    with pytest.raises(UserError, match=r"gone.png: no such file"):
        usable(data, builder, limit)


def test_the_demo_prompt_is_short(tiny_demo: Path) -> None:
    builder = PromptBuilder(tiny_demo, 4, 256)
    for kind in ("shapes", "digits"):
        data = open_source(SourceSettings(kind=kind, size=40, options={"locations": 0.3}))
        lengths = {builder.length(example) for example in data}
        assert lengths == {43}, kind
        prompt = builder.build(data[0])
        assert prompt.image_counts == (16,) and all(len(roi) == 4 for roi in prompt.roi)


def test_broken_checkpoints_are_named(tiny_qwen25: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_qwen25 / "config.json").read_text())
    with pytest.raises(UserError, match="processor or config cannot be loaded") as caught:
        PromptBuilder(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="min_visual_tokens: 9 exceeds max_visual_tokens 8"):
        PromptBuilder(tiny_qwen25, 9, 8)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_qwen25.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m['role'] }}{% endfor %}")
    example = Example("e1", (str(SAMPLES / "pictures/desk.png"),), "What?", "x")
    with pytest.raises(UserError, match="record e1: the chat template gives 0 placeholders for 1 images"):
        PromptBuilder(copy).build(example)
    assert json.loads((copy / "config.json").read_text())["architectures"]
