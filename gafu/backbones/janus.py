"""Janus and Janus-Pro, as transformers has them, unchanged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, normalize
from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor
from transformers.models.janus.processing_janus import DEFAULT_SYSTEM_PROMPT
from transformers.models.llama.modeling_llama import rotate_half

from gafu.backbones.base import Adapter, Batch, Geometry, Grid, Pixels, Row
from gafu.config import BackboneSettings
from launch.errors import UserError


def pro_7b_config() -> JanusConfig:
    """Sizes of Janus-Pro-7B, for plans and dry runs without its weights."""
    text = {"model_type": "llama", "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008}
    text |= {"num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6}
    text |= {"max_position_embeddings": 16_384, "bos_token_id": 100_000, "eos_token_id": 100_001}
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 384}
    vision |= {"patch_size": 16, "projection_dim": 4096, "num_image_tokens": 576}
    vq = {"projection_dim": 4096, "image_token_embed_dim": 4096}
    return JanusConfig(text_config=text, vision_config=vision, vq_config=vq, tie_word_embeddings=False)


class JanusAdapter(Adapter):
    """U: SigLIP and aligner. R_G: the VQ encoder's continuous output after `quant_conv`, normalised; VQ decoder."""

    answer_prefix = " "
    """Janus answers follow `<|Assistant|>:` after a space."""

    def __init__(self, model: JanusForConditionalGeneration, processor: JanusProcessor | None):
        """processor: needed for pictures and text only."""
        super().__init__()
        self.model, self.processor = model, processor
        text, vision, vq = model.config.text_config, model.config.vision_config, model.config.vq_config
        side = vision.image_size // vision.patch_size
        latent_side = vision.image_size // 2 ** (len(vq.channel_multiplier) - 1)
        self.geometry = Geometry(
            d_und=text.hidden_size,
            n_layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            u_grid=(side, side),
            g_grid=(latent_side, latent_side),
            g_channels=vq.embed_dim,
            bind_channels=vq.embed_dim,
            understanding_px=vision.image_size,
            generation_px=vision.image_size,
            bind_energy=True,
        )
        self._prepare()

    @classmethod
    def load(cls, settings: BackboneSettings) -> "JanusAdapter":
        path = settings.path
        try:
            model, report = JanusForConditionalGeneration.from_pretrained(
                path, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa", output_loading_info=True
            )
            processor = JanusProcessor.from_pretrained(path)
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path}: the Janus model cannot be loaded ({reason}); restore the checkpoint") from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise UserError(
                f"{path}: {len(missing)} weights are missing, {missing[0]} first; the files do not fit config.json: "
                "restore the checkpoint"
            )
        return cls(model, processor)

    @classmethod
    def dry(cls, settings: BackboneSettings) -> "JanusAdapter":
        return cls.from_config(JanusConfig.from_pretrained(settings.path))

    @classmethod
    def from_config(cls, config: JanusConfig) -> "JanusAdapter":
        """Sizes without weights, on the meta device."""
        with torch.device("meta"):
            model = JanusForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        return cls(model, None)

    def save(self, folder: str | Path) -> None:
        if any(".lora_" in name for name, _ in self.model.named_parameters()):
            raise ValueError("adapters are on: save them apart, or merge them first")
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)

    def understanding_model(self) -> nn.Module:
        return self.model.model.language_model

    def layers(self) -> Sequence[nn.Module]:
        return self.model.model.language_model.layers

    @property
    def _dtype(self) -> torch.dtype:
        return self.model.lm_head.weight.dtype

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def preprocess(self, images: Sequence[Image.Image]) -> Pixels:
        """Janus scales the longer side to its square and pads; both pathways see that picture, [-1, 1] for the VQ."""
        worker = self.processor.image_processor
        for index, image in enumerate(images):
            if min(image.size) < worker.min_size:
                raise UserError(
                    f"image {index}: it is {image.width}×{image.height} pixels; each side should have at least "
                    f"{worker.min_size}: leave it out or give a larger one"
                )
        pixels = worker(images=[image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (worker.image_mean, worker.image_std))
        generation = (pixels * std + mean) * 2 - 1
        return Pixels(pixels.to(self._device, self._dtype), generation.to(self._device, self._dtype))

    @torch.no_grad()
    def understanding_tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.model.model.get_image_features(pixels.to(self._dtype)).pooler_output

    @torch.no_grad()
    def generation_latents(self, pixels: torch.Tensor) -> torch.Tensor:
        # Not `encode`: it goes on to the nearest code, and without the normalisation of the original's search.
        vq = self.model.model.vqmodel
        latents = vq.quant_conv(vq.encoder(pixels.to(self._dtype)))
        return normalize(latents, dim=1).permute(0, 2, 3, 1)

    def bind_target(self, latents: torch.Tensor, grid: Grid | None = None) -> torch.Tensor:
        grid = grid or self.geometry.bind_grid
        return adaptive_avg_pool2d(latents.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)

    def decode_generation(self, latents: torch.Tensor) -> torch.Tensor:
        vq = self.model.model.vqmodel
        return vq.decoder(vq.post_quant_conv(latents.permute(0, 3, 1, 2)))

    def build_batch(self, rows: Sequence[Row], extra_slots: int = 0, pad: str = "right") -> Batch:
        if pad not in ("left", "right"):
            raise ValueError(f"pad is {pad!r}; it should be 'left' or 'right'")
        slots = self.geometry.u_tokens + extra_slots
        pieces = [self._row_ids(row, slots) for row in rows]
        longest = max(len(prompt) + len(answer) for prompt, answer in pieces)
        size = (len(rows), longest)
        ids = torch.full(size, self.processor.tokenizer.pad_token_id)
        mask, labels = torch.zeros(size, dtype=torch.bool), torch.full(size, -100)
        for index, (prompt, answer) in enumerate(pieces):
            n = len(prompt) + len(answer)
            where = slice(0, n) if pad == "right" else slice(longest - n, longest)
            ids[index, where] = torch.tensor(prompt + answer)
            mask[index, where] = True
            labels[index, where] = torch.tensor([-100] * len(prompt) + answer)
        return Batch(
            ids=ids.to(self._device),
            mask=mask.to(self._device),
            positions=(mask.cumsum(1) - 1).clamp(min=0).to(self._device),
            visual=((ids == self.model.config.image_token_id) & mask).to(self._device),
            labels=labels.to(self._device),
            image_rows=torch.tensor([i for i, row in enumerate(rows) if row.image], dtype=torch.long).to(self._device),
            slots=slots,
        )

    def _row_ids(self, row: Row, slots: int) -> tuple[list[int], list[int]]:
        processor, tokenizer = self.processor, self.processor.tokenizer
        for text in (row.question, row.answer or ""):
            if processor.image_token in text:
                raise UserError(f"question {row.question[:60]!r}: it holds {processor.image_token}; take it out")
        image = [{"type": "image"}] if row.image else []
        message = {"role": "user", "content": [*image, {"type": "text", "text": row.question}]}
        text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        if processor.use_default_system_prompt:  # the processor's own call puts it there, the template does not
            text = DEFAULT_SYSTEM_PROMPT + text
        block = processor.image_start_token + processor.image_token * slots + processor.image_end_token
        text = text.replace(processor.image_token, block)
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        prompt = tokenizer(text, add_special_tokens=not begins)["input_ids"]
        if row.answer is None:
            return prompt, []
        answer = tokenizer(self.answer_prefix + row.answer, add_special_tokens=False)["input_ids"]
        return prompt, [*answer, tokenizer.eos_token_id]

    def embed(self, batch: Batch, visual: torch.Tensor) -> torch.Tensor:
        expected = (len(batch.image_rows), batch.slots)
        if len(visual) and tuple(visual.shape[:2]) != expected:
            raise ValueError(f"visual tokens are {tuple(visual.shape[:2])}; the batch has room for {expected}")
        embeds = self.understanding_model().get_input_embeddings()(batch.ids)
        if len(batch.image_rows) == 0:
            return embeds
        return embeds.masked_scatter(batch.visual[..., None], visual.to(embeds.dtype))

    def run(self, embeds: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, batch: Batch, **extra: Any) -> Any:
        return self.understanding_model()(
            inputs_embeds=embeds, attention_mask=mask.long(), position_ids=positions, **extra
        )

    def head(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(states)

    def gtoken_positions(self, batch: Batch, grid: Grid) -> torch.Tensor:
        rows, columns = self.geometry.u_grid
        own = batch.positions[batch.visual].view(len(batch.image_rows), batch.slots)
        i = ((torch.arange(grid[0]) + 0.5) * rows / grid[0]).long()
        j = ((torch.arange(grid[1]) + 0.5) * columns / grid[1]).long()
        cells = (i[:, None] * columns + j).flatten()
        return own[:, cells.to(own.device)]

    def rotary(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.understanding_model().rotary_emb(x, positions)
        return x * cos[:, None] + rotate_half(x) * sin[:, None]

    def lora_targets(self) -> tuple[str, ...]:
        return ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def decode_text(self, ids: Sequence[int]) -> str:
        return self.processor.tokenizer.decode(ids, skip_special_tokens=True).strip()

    @property
    def end_ids(self) -> tuple[int, ...]:
        return (self.processor.tokenizer.eos_token_id,)
