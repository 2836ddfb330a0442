"""The base phase: packed questions equal separate prompts, the tower learns, the job leaves a usable checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from launch.cli import start_job
from launch.errors import UserError
from realvr.config import BaseSettings, ProbeSettings, SourceSettings
from realvr.data.prompts import PromptBuilder
from realvr.data.sources.shapes import Shapes
from realvr.families import get_family
from realvr.train.base import _fresh_model, open_world, train_base
from realvr.train.packs import build_packs, load_pictures, packed_states, see
from realvr.train.tower import train_tower


def world(size: int = 24, **options) -> Shapes:
    return Shapes(SourceSettings(kind="shapes", size=size, options={"questions_per_scene": 4, **options}))


def settings(path: Path, **changes) -> BaseSettings:
    data = {"train": {"kind": "shapes", "size": 64, "options": {"questions_per_scene": 4}}, "validation_size": 16}
    small = {"probe": {"steps": 2}, "steps": 2, "images_per_step": 4, "attempts": 1, "target_accuracy": 0}
    return BaseSettings.model_validate(
        {"model": {"path": str(path), "dtype": "float32"}, "data": data, **small} | changes
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_packed_questions_equal_separate_prompts(family: str, tmp_path: Path):
    get_family(family).tiny(str(tmp_path / "m"), "demo", 0)
    builder = PromptBuilder(str(tmp_path / "m"))
    model = _fresh_model(builder).eval()
    parts = builder.family.parts(model)
    examples = world(8, locations=0.3)[:]
    seen = see(builder.family, parts.tower, load_pictures(builder, examples[::4]))
    packs = build_packs(examples, 4, seen, builder)
    with torch.no_grad():
        states, labels, question = packed_states(builder.family, parts, packs, torch.arange(2))
        for number, example in enumerate(examples):
            prompt = builder.build(example)
            answer = builder.tokenizer(f"<answer>{example.answer}</answer>", add_special_tokens=False).input_ids
            ids = torch.cat([prompt.input_ids, torch.tensor(answer)])
            after = prompt.next_position + torch.arange(len(answer)).expand(3, -1)
            whole = model.model(
                input_ids=ids[None],
                pixel_values=prompt.pixels,
                image_grid_thw=prompt.grid_thw,
                position_ids=torch.cat([prompt.positions, after], 1)[:, None],
            ).last_hidden_state[0, len(prompt.input_ids) - 1 :]
            torch.testing.assert_close(states[question == number], whole, atol=2e-4, rtol=1e-3)
            assert labels[question == number].tolist() == [*answer, builder.ids.eos[0]]


def test_tower_learns_what_stands_in_a_quadrant(tiny_demo: Path):
    torch.manual_seed(0)
    builder = PromptBuilder(str(tiny_demo))
    tower = builder.family.parts(_fresh_model(builder)).tower
    scenes = world(512)[::4]
    found: list[dict[str, float]] = []
    pictures = load_pictures(builder, scenes)
    train_tower(tower, builder, world(512), scenes, pictures, ProbeSettings(steps=25, lr=4e-3), found.append)
    assert sum(m["colour_accuracy"] for m in found[-5:]) / 5 > 0.5  # chance is 1 in 6
    assert not any(p.requires_grad for p in tower.parameters())


def test_job_writes_a_checkpoint_that_loads(tiny_demo: Path, tmp_path: Path):
    config = tmp_path / "base.yaml"
    config.write_text(json.dumps(settings(tiny_demo, runs_dir=str(tmp_path), name="b").model_dump(mode="json")))
    start_job(config)
    from transformers import AutoModelForImageTextToText

    folder = tmp_path / "b" / "model"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    builder = PromptBuilder(str(folder))
    assert builder.ids == PromptBuilder(str(tiny_demo)).ids
    before = AutoModelForImageTextToText.from_pretrained(tiny_demo)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before.get_parameter(n))]
    assert any("visual" in n for n in moved) and any("language_model" in n for n in moved) and "lm_head.weight" in moved
    lines = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert "probe/noun_accuracy" in lines[0] and "base/accuracy" in lines[2] and "validation/accuracy" in lines[4]
    assert json.loads((tmp_path / "b" / "run.json").read_text())["status"] == "finished"


def test_a_seed_that_does_not_learn_is_replaced_and_at_last_refused(tiny_demo: Path, tmp_path: Path):
    phases: list[str] = []
    wanted = settings(tiny_demo, attempts=2, target_accuracy=0.99)
    with pytest.raises(UserError, match=r"2 seeds from 0 on reached accuracy 0\.\d+.*target_accuracy"):
        train_base(wanted, tmp_path / "out", lambda phase, _: phases.append(phase))
    assert phases == ["probe", "probe", "base", "base"] * 2
    assert not (tmp_path / "out").exists()


def test_large_models_and_real_data_are_refused(tiny_demo: Path, tmp_path: Path):
    large = tmp_path / "large"
    shutil.copytree(tiny_demo, large)
    config = json.loads((large / "config.json").read_text())
    config["text_config"] |= {"hidden_size": 1024, "vocab_size": 50_000}
    config["vision_config"]["out_hidden_size"] = 1024
    (large / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="trains tiny models from scratch"):
        train_base(settings(large), tmp_path / "out", lambda *_: None)
    with pytest.raises(UserError, match="learns generated worlds"):
        open_world(SourceSettings(kind="jsonl", path="x.jsonl"))


def test_scenes_must_be_whole(tiny_demo: Path):
    builder = PromptBuilder(str(tiny_demo))
    examples = world(8)[:]
    with pytest.raises(UserError, match="questions_per_scene"):
        build_packs(examples[1:], 4, None, builder)
