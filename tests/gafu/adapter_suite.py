"""What every backbone adapter must pass. A test module subclasses AdapterSuite and gives the fixture `folder`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image

from gafu.backbones import load_backbone
from gafu.backbones.base import KEYWORD, Adapter, Row
from gafu.config import BackboneSettings
from launch.errors import UserError

ROWS = [
    Row("what color is the dot", "red"),
    Row("how many circles are there, and where is the star?", "two above"),
    Row("no picture here: yes or no", "no", image=False),
]


def pictures(n: int) -> list[Image.Image]:
    """Noise of different shapes, a seed each."""
    shapes = [(60, 80, 3), (96, 50, 3), (64, 64, 3)]
    noise = (np.random.default_rng(i).integers(0, 256, shapes[i % 3], dtype=np.uint8) for i in range(n))
    return [Image.fromarray(values) for values in noise]


class Shift:
    """A stand-in for an injection: adds its own tensor to a layer's output."""

    def __init__(self, layer: int, tensor: torch.Tensor):
        self.layer, self.tensor = layer, tensor

    def after_layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.tensor if layer == self.layer else hidden

    def visual(self, understanding: torch.Tensor) -> torch.Tensor:
        return understanding

    def queries(self, positions: torch.Tensor, text: torch.Tensor, visual: torch.Tensor) -> "Shift":
        return self


class AdapterSuite:
    """Subclass with a fixture `folder` (scope class or wider): a float32 checkpoint of the backbone."""

    @pytest.fixture(scope="class")
    def adapter(self, folder: Path) -> Adapter:
        return load_backbone(BackboneSettings(path=str(folder), dtype="float32", gradient_checkpointing=False))

    @pytest.fixture(scope="class")
    def seen(self, adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pixels = adapter.preprocess(pictures(2))
        latents = adapter.generation_latents(pixels.generation)
        return adapter.understanding_tokens(pixels.understanding), latents, pixels.generation

    def test_shapes_are_the_geometry(self, adapter, seen):
        shape, (u, latents, pixels) = adapter.geometry, seen
        assert u.shape == (2, shape.u_tokens, shape.d_und)
        assert latents.shape == (2, *shape.g_grid, shape.g_channels)
        assert adapter.decode_generation(latents).shape == pixels.shape == (2, 3, *[shape.generation_px] * 2)
        assert pixels.min() >= shape.pixel_range[0] - 1e-6 and pixels.max() <= shape.pixel_range[1] + 1e-6
        assert pixels.min() < 0.5 * shape.pixel_range[0] and pixels.max() > 0.5 * shape.pixel_range[1]
        assert adapter.bind_target(latents).shape == (2, *shape.bind_grid, shape.bind_channels)
        assert adapter.bind_target(latents, (4, 4)).shape[1:3] == (4, 4)
        assert len(adapter.layers()) == shape.n_layers
        assert not any(p.requires_grad for p in adapter.parameters())

    def test_generation_latents_are_the_same_at_every_call(self, adapter, seen):
        for mode in (True, False):
            adapter.train(mode)
            torch.manual_seed(int(mode))
            assert torch.equal(adapter.generation_latents(seen[2]), seen[1])
        assert not seen[0].requires_grad and not seen[1].requires_grad

    def test_gradient_through_the_decoder_equals_finite_differences(self, folder, seen):
        double = load_backbone(BackboneSettings(path=str(folder), dtype="float32")).double()
        latents = seen[1][:1].double().requires_grad_()
        target = seen[2][:1].double()

        def loss(z: torch.Tensor) -> torch.Tensor:
            return (double.decode_generation(z) - target).square().sum()

        gradient = torch.autograd.grad(loss(latents), latents)[0]
        for seed in range(3):
            way = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            step = 1e-5
            slope = (loss(latents.detach() + step * way) - loss(latents.detach() - step * way)) / (2 * step)
            torch.testing.assert_close((gradient * way).sum(), slope, rtol=1e-6, atol=1e-6)

    def test_padded_equals_unpadded(self, adapter, seen):
        batch = adapter.build_batch(ROWS)
        whole = adapter(batch, seen[0])
        for pad in ("right", "left"):
            padded = adapter.build_batch(ROWS, pad=pad)
            logits, at = adapter(padded, seen[0], keep=padded.answers), padded.targets[1]
            for i, row in enumerate(ROWS):
                alone = adapter.build_batch([row])
                u = seen[0][i : i + 1] if row.image else seen[0][:0]
                assert torch.equal(padded.positions[i][padded.mask[i]], alone.positions[0])
                torch.testing.assert_close(logits[at == i], adapter(alone, u, keep=alone.answers), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole[batch.answers], adapter(batch, seen[0], keep=batch.answers))

    def test_the_labels_are_the_answers(self, adapter):
        batch = adapter.build_batch(ROWS)
        for i, row in enumerate(ROWS):
            ids, labels = batch.ids[i], batch.labels[i]
            answer = labels[labels != -100]
            assert adapter.decode_text(answer.tolist()) == row.answer and int(answer[-1]) in adapter.end_ids
            assert torch.equal(ids[labels != -100], answer)
            assert int(batch.visual[i].sum()) == (adapter.geometry.u_tokens if row.image else 0)
            assert not (batch.text[i] & batch.visual[i]).any() and not batch.text[i][~batch.mask[i]].any()
        targets, rows = batch.targets
        assert torch.equal(targets[rows == 1], batch.labels[1][batch.labels[1] != -100])
        assert batch.image_rows.tolist() == [0, 1]

    def test_rows_read_their_own_image(self, adapter, seen):
        batch = adapter.build_batch(ROWS)
        logits = adapter(batch, seen[0])
        other = adapter(batch, torch.stack([seen[0][0], seen[0][0]]))
        assert torch.equal(logits[0], other[0]) and torch.equal(logits[2], other[2])
        assert (logits[1] - other[1]).abs().max() > 1e-4

    def test_rows_without_an_image(self, adapter, seen):
        batch = adapter.build_batch([ROWS[2], ROWS[2]])
        assert not batch.visual.any() and len(batch.image_rows) == 0
        logits = adapter(batch, seen[0][:0])
        assert logits.isfinite().all() and torch.equal(logits[0], logits[1])

    def test_generation_equals_stepwise_argmax_without_a_cache(self, adapter, seen):
        prompts = [Row(row.question, None, row.image) for row in ROWS]
        shift = Shift(1, 0.3 * torch.ones(adapter.geometry.d_und))
        for injection in (None, shift):
            found = adapter.generate(adapter.build_batch(prompts, pad="left"), seen[0], injection, max_new_tokens=5)
            for i, row in enumerate(prompts):
                batch, u = adapter.build_batch([row]), seen[0][i : i + 1] if row.image else seen[0][:0]
                embeds, ids = adapter.embed(batch, u), []
                for _ in range(5):
                    n = embeds.shape[1]
                    extra = {} if injection is None else {KEYWORD: injection}
                    mask, positions = torch.ones(1, n, dtype=torch.bool), torch.arange(n)[None]
                    out = adapter.run(embeds, mask, positions, batch, use_cache=False, **extra)
                    token = int(adapter.head(out.last_hidden_state[:, -1]).argmax())
                    if token in adapter.end_ids:
                        break
                    ids.append(token)
                    table = adapter.understanding_model().get_input_embeddings()
                    embeds = torch.cat([embeds, table(torch.tensor([[token]]))], 1)
                assert found[i] == ids

    def test_right_padding_is_refused_in_generation(self, adapter, seen):
        with pytest.raises(ValueError, match="padded on the left"):
            adapter.generate(adapter.build_batch(ROWS), seen[0])

    def test_checkpointing_reads_the_injection_of_its_own_call(self, folder, seen):
        """The trap: a second forward with another G comes between a forward and its backward."""
        adapter = load_backbone(BackboneSettings(path=str(folder), dtype="float32", gradient_checkpointing=False))
        batch = adapter.build_batch(ROWS)
        gradients = []
        for recompute in (False, True):
            adapter.checkpoint_layers(recompute)
            adapter.train()
            tensors = [torch.full((adapter.geometry.d_und,), v, requires_grad=True) for v in (0.1, 0.5)]
            losses = [adapter(batch, seen[0], Shift(1, t)).square().mean() for t in tensors]
            gradients.append(torch.autograd.grad(losses[0] + 2 * losses[1], tensors))
        torch.testing.assert_close(gradients[0], gradients[1])
        assert gradients[0][0].abs().max() > 0

    def test_frozen_pathways_are_bit_identical_after_training(self, folder, seen):
        adapter = load_backbone(BackboneSettings(path=str(folder), dtype="float32", gradient_checkpointing=True))
        model, batch = adapter.understanding_model(), adapter.build_batch(ROWS)
        before = adapter(batch, seen[0], keep=batch.answers)
        config = LoraConfig(r=4, lora_alpha=4, target_modules=list(adapter.lora_targets()), lora_dropout=0.0)
        inject_adapter_in_model(config, model)
        trained = [p for p in adapter.parameters() if p.requires_grad]
        assert trained and all(p.requires_grad for n, p in adapter.named_parameters() if "lora_" in n)
        assert torch.equal(adapter(batch, seen[0], keep=batch.answers), before)
        optimizer = torch.optim.SGD(trained, lr=1.0)
        adapter.train()
        for _ in range(2):
            logits = adapter(batch, seen[0], keep=batch.answers)
            torch.nn.functional.cross_entropy(logits, batch.targets[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        pixels = adapter.preprocess(pictures(2))
        assert torch.equal(adapter.understanding_tokens(pixels.understanding), seen[0])
        assert torch.equal(adapter.generation_latents(pixels.generation), seen[1])
        fresh = load_backbone(BackboneSettings(path=str(folder), dtype="float32"))
        assert torch.equal(adapter.decode_generation(seen[1]), fresh.decode_generation(seen[1]))
        assert not torch.equal(adapter(batch, seen[0], keep=batch.answers), before)

    def test_save_and_load(self, adapter, seen, tmp_path):
        adapter.save(tmp_path / "copy")
        again = load_backbone(BackboneSettings(path=str(tmp_path / "copy"), dtype="float32"))
        pixels, batch = again.preprocess(pictures(2)), again.build_batch(ROWS)
        assert torch.equal(again.understanding_tokens(pixels.understanding), seen[0])
        assert torch.equal(again.generation_latents(pixels.generation), seen[1])
        assert torch.equal(again(batch, seen[0]), adapter(adapter.build_batch(ROWS), seen[0]))

    def test_rotary_and_positions(self, adapter):
        """Scores depend on the distance of positions only; G lies on its image's own positions, in raster order."""
        shape = adapter.geometry
        x = torch.randn(1, shape.heads, 2, shape.head_dim, generator=torch.Generator().manual_seed(0))
        here, there = (adapter.rotary(x, torch.tensor([[a, a + 5]])) for a in (0, 90))
        scores = [(t[:, :, 0] * t[:, :, 1]).sum(-1) for t in (here, there)]
        torch.testing.assert_close(scores[0], scores[1], rtol=1e-3, atol=1e-4)
        batch = adapter.build_batch(ROWS)
        own = adapter.gtoken_positions(batch, shape.u_grid)
        for i, row in enumerate(batch.image_rows.tolist()):
            assert torch.equal(own[i], batch.positions[row][batch.visual[row]])
        coarse = adapter.gtoken_positions(batch, (2, 2)).view(2, 2, 2)
        whole = own.view(2, *shape.u_grid)
        assert torch.equal(coarse, whole[:, shape.u_grid[0] // 4 :: shape.u_grid[0] // 2, shape.u_grid[1] // 4 ::
                                         shape.u_grid[1] // 2])  # fmt: skip

    def test_too_small_a_picture_is_named(self, adapter):
        with pytest.raises(UserError, match=r"image 1: it is 2×40 pixels; each side should have at least"):
            adapter.preprocess([*pictures(1), Image.new("RGB", (2, 40))])

    def test_visual_tokens_must_fit(self, adapter, seen):
        with pytest.raises(ValueError, match="the batch has room for"):
            adapter(adapter.build_batch(ROWS, extra_slots=3), seen[0])
