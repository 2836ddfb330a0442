"""The Janus adapter: the suite, the traps of its VQ, real sizes without weights, and bad checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from gafu.backbones import dry_backbone, load_backbone
from gafu.backbones.base import Row
from gafu.backbones.janus import JanusAdapter, pro_7b_config
from gafu.backbones.tiny import Size, write_janus
from gafu.config import BackboneSettings
from launch.errors import UserError
from tests.gafu.adapter_suite import ROWS, AdapterSuite, pictures


class TestJanus(AdapterSuite):
    @pytest.fixture(scope="class")
    def folder(self, tiny_janus: Path) -> Path:
        return tiny_janus

    def test_logits_are_those_of_transformers(self, adapter, seen):
        batch = adapter.build_batch(ROWS[:2])
        native = adapter.model(
            input_ids=batch.ids,
            attention_mask=batch.mask.long(),
            mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=seen[0])},
        ).logits
        torch.testing.assert_close(adapter(batch, seen[0])[batch.mask], native[batch.mask])

    @pytest.mark.parametrize("system", [False, True])
    def test_prompts_are_those_of_the_processor(self, adapter, monkeypatch, system):
        monkeypatch.setattr(adapter.processor, "use_default_system_prompt", system)
        content = [{"type": "image"}, {"type": "text", "text": "where is the bar"}]
        text = adapter.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        native = adapter.processor(text=[text], images=pictures(1), add_special_tokens=False)
        batch = adapter.build_batch([Row("where is the bar")])
        assert batch.ids.tolist() == native["input_ids"].tolist()
        torch.testing.assert_close(native["pixel_values"], adapter.preprocess(pictures(1)).understanding)

    def test_latents_are_continuous_and_of_unit_length(self, adapter, seen):
        latents = seen[1]
        torch.testing.assert_close(latents.norm(dim=-1), torch.ones(latents.shape[:-1]))
        codes = torch.nn.functional.normalize(adapter.model.model.vqmodel.quantize.embedding.weight, dim=-1)
        assert torch.cdist(latents.flatten(0, 2), codes).min() > 1e-3

    def test_train_leaves_the_visual_pathways_in_eval_mode(self, adapter):
        adapter.train()
        assert adapter.understanding_model().training
        assert not adapter.model.model.vqmodel.training and not adapter.model.model.vision_model.training
        adapter.eval()
        assert not adapter.understanding_model().training

    def test_an_image_token_in_a_question_is_refused(self, adapter):
        with pytest.raises(UserError, match="it holds <image_placeholder>; take it out"):
            adapter.build_batch([Row("what is <image_placeholder>", "red")])


def test_the_real_sizes_without_weights():
    adapter = JanusAdapter.from_config(pro_7b_config())
    shape = adapter.geometry
    assert (shape.d_und, shape.n_layers, shape.heads, shape.head_dim) == (4096, 30, 32, 128)
    assert shape.u_grid == shape.g_grid == (24, 24) and shape.g_channels == 8 and shape.generation_px == 384
    assert {p.device.type for p in adapter.parameters()} == {"meta"}
    assert 7.2e9 < sum(p.numel() for p in adapter.parameters()) < 7.6e9
    pixels = torch.zeros(1, 3, 384, 384, device="meta")
    assert adapter.understanding_tokens(pixels).shape == (1, 576, 4096)
    latents = adapter.generation_latents(pixels)
    assert latents.shape == (1, 24, 24, 8) and adapter.decode_generation(latents).shape == (1, 3, 384, 384)
    assert adapter.bind_target(latents).shape == (1, 16, 16, 8)


def test_bad_checkpoints_are_one_line(tmp_path, tiny_janus):
    def settings(path: Path) -> BackboneSettings:
        return BackboneSettings(path=str(path), dtype="float32")

    with pytest.raises(UserError):
        load_backbone(settings(tmp_path / "none"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match="LlamaForCausalLM, which is no backbone of gafu"):
        load_backbone(settings(tmp_path / "llama"))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tiny_janus / "config.json").read_text())
    with pytest.raises(UserError, match=r"the Janus model cannot be loaded .*restore the checkpoint"):
        load_backbone(settings(bare))
    assert dry_backbone(settings(tiny_janus)).geometry.d_und == 64


def test_tiny_sizes_must_fit(tmp_path, tiny_janus):
    with pytest.raises(UserError, match="power of two"):
        write_janus(tmp_path / "a", Size(image=48, patch=6))
    with pytest.raises(UserError, match="not empty"):
        write_janus(tiny_janus)
