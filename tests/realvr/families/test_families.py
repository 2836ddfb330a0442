"""Families against transformers: same positions, features, logits and saved names; vLLM has the class we name."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast

from launch.errors import UserError
from realvr.families import family_names, family_of, get_family
from realvr.families.tiny import WORDS

GRIDS = [(8, 8), (4, 12), (2, 2)]  # patches, three images of unequal shape


@pytest.fixture(scope="module", params=["tiny_qwen25", "tiny_qwen3"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def _prompt(folder: Path, model: torch.nn.Module, grids: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    ids = family_of(folder).token_ids(AutoProcessor.from_pretrained(folder).tokenizer, str(folder))
    tokens = [5, 6, 7]
    for rows, columns in grids:
        tokens += [*[ids.image] * (rows * columns // 4), 9]
    tokens += [10, 11]
    vision = model.config.vision_config
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    count = sum(rows * columns for rows, columns in grids)
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.tensor([tokens]),
        "pixel_values": torch.randn(count, patch, generator=generator),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in grids]).reshape(-1, 3),
        "mm_token_type_ids": (torch.tensor([tokens]) == ids.image).int(),
    }


def test_positions_equal_transformers(folder: Path, model: torch.nn.Module) -> None:
    for grids in (GRIDS, GRIDS[1:2], []):
        batch = _prompt(folder, model, grids)
        ours, following = family_of(folder).positions(model.config, batch["input_ids"][0], batch["image_grid_thw"])
        theirs, _ = model.model.get_rope_index(
            batch["input_ids"], batch["mm_token_type_ids"], image_grid_thw=batch["image_grid_thw"]
        )
        assert torch.equal(ours, theirs[:, 0])
        assert following == int(theirs.max()) + 1


def test_parts_and_inputs_reproduce_the_whole_model(folder: Path, model: torch.nn.Module) -> None:
    family = family_of(folder)
    batch = _prompt(folder, model, GRIDS)
    parts = family.parts(model)
    with torch.no_grad():
        features = family.visual_features(parts.tower, batch["pixel_values"], batch["image_grid_thw"])
        theirs = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
        assert torch.equal(features.embeds, torch.cat(list(theirs.pooler_output)))
        mask = batch["input_ids"] == model.config.image_token_id
        embeds = parts.language_model.embed_tokens(batch["input_ids"])
        embeds = embeds.masked_scatter(mask[..., None].expand_as(embeds), features.embeds)
        positions, _ = family.positions(model.config, batch["input_ids"][0], batch["image_grid_thw"])
        extra = family.language_inputs(features, mask)
        hidden = parts.language_model(inputs_embeds=embeds, position_ids=positions[:, None], **extra)
        logits = parts.lm_head(hidden.last_hidden_state)
        expected = model(**batch).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1, "a model with flat logits would agree with anything"


def test_deepstack_features_matter(tiny_qwen3: Path) -> None:
    family = family_of(tiny_qwen3)
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    batch = _prompt(tiny_qwen3, model, GRIDS)
    with torch.no_grad():
        features = family.visual_features(family.parts(model).tower, batch["pixel_values"], batch["image_grid_thw"])
    assert len(features.deepstack) == 2
    assert all(f.shape == features.embeds.shape and f.std() > 0 for f in features.deepstack)


def test_prefixes_are_those_of_the_saved_file(folder: Path, model: torch.nn.Module) -> None:
    family = family_of(folder)
    prefixes, parts = family.checkpoint_prefixes(), family.parts(model)
    with safe_open(folder / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no dict)
    found = {}
    for field, prefix in prefixes.items():
        for name, value in getattr(parts, field).state_dict().items():
            assert torch.equal(saved[prefix + name], value), prefix + name
            found[prefix + name] = value
    assert set(found) == set(saved), "every saved tensor belongs to one part"


def test_vllm_class_exists(folder: Path) -> None:
    module, name = family_of(folder).vllm_model.split(":")
    package = importlib.util.find_spec("vllm")  # its submodules would import it, which takes seconds
    assert package is not None and package.origin
    source = Path(package.origin).parents[1] / (module.replace(".", "/") + ".py")
    assert f"class {name}(" in source.read_text()


def test_tiny_tokenizer(folder: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    for word in WORDS:
        assert len(tokenizer(word)["input_ids"]) == len(tokenizer(f" {word}")["input_ids"]) == 1, word
    assert len(tokenizer("<answer>topleft</answer>")["input_ids"]) == 3
    for text in ("Größe 東京\n\n zebra?", "<|lvr_start|><|lvr|><|lvr|><|lvr_end|><answer>red</answer><|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = family_of(folder).token_ids(tokenizer, str(folder))
    assert len({ids.start, ids.latent, ids.end, ids.image, ids.pad, *ids.eos, *ids.banned}) == 9
    assert ids.image in ids.banned
    model_vocabulary = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    assert model_vocabulary == len(tokenizer), "an id without a token could be sampled and not decoded"


def test_demo_size_and_seed(tmp_path: Path) -> None:
    for name in family_names():
        for seed in (0, 1):
            get_family(name).tiny(str(tmp_path / f"{name}{seed}"), "demo", seed)
        weights = []
        for seed in (0, 1):
            model = AutoModelForImageTextToText.from_pretrained(tmp_path / f"{name}{seed}", dtype=torch.float32)
            weights.append(model.lm_head.weight)
        assert not torch.equal(*weights)
        assert model.config.text_config.rope_parameters["rope_theta"] == 10
        assert 0.1 < float(weights[0].detach().std()) < 0.15  # hidden^-0.5 = 0.125


def test_eos_ids_of_the_generation_config_count(tiny_qwen25: Path, tmp_path: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(tiny_qwen25).tokenizer
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, 3]}))
    assert get_family("qwen2_5_vl").token_ids(tokenizer, str(tmp_path)).eos == (tokenizer.eos_token_id, 3)


def test_errors_are_one_line_and_name_the_remedy(tiny_qwen25: Path, tmp_path: Path) -> None:
    for content, wanted in (
        (None, "no config.json"),
        ("{", "cannot be read as JSON"),
        ('{"architectures": ["LlamaForCausalLM"]}', "supported are Qwen2_5_VLForConditionalGeneration, Qwen3VL"),
        ("{}", "no architecture"),
    ):
        folder = tmp_path / str(abs(hash(content)))
        folder.mkdir()
        if content:
            (folder / "config.json").write_text(content)
        with pytest.raises(UserError, match=wanted) as caught:
            family_of(folder)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    with pytest.raises(UserError, match="no such checkpoint folder"):
        family_of(tmp_path / "nowhere")
    with pytest.raises(UserError, match="neither a local folder nor reachable"):
        family_of("nobody/no-such-model")
    with pytest.raises(UserError, match="supported are qwen2_5_vl, qwen3_vl"):
        get_family("qwen9")
    with pytest.raises(UserError, match="choose test or demo"):
        get_family("qwen3_vl").tiny(str(tmp_path / "new"), "huge", 0)
    with pytest.raises(UserError, match="not empty"):
        get_family("qwen3_vl").tiny(str(tiny_qwen25), "test", 0)


def test_missing_latent_token_stops(tiny_qwen25: Path, tmp_path: Path) -> None:
    content = json.loads((tiny_qwen25 / "tokenizer.json").read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<|lvr|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|im_end|>")
    with pytest.raises(UserError, match=r"some/where: the tokenizer lacks <\|lvr\|>;"):
        family_of(tiny_qwen25).token_ids(tokenizer, "some/where")
