"""A run's checkpoint as a plain transformers model, with adapters merged and a model card."""

import logging
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch

from launch.checkpoints import Checkpoint, CheckpointStore, read_checkpoint
from launch.config import load_config
from launch.engine import SHARDS
from launch.errors import UserError
from realvr.config import RLSettings, SftSettings
from realvr.data.prompts import PromptBuilder
from realvr.families.base import END, LATENT, START
from realvr.policy.model import Policy, load_policy
from realvr.rollout.weights_file import checkpoint_folder, checkpoint_shapes

log = logging.getLogger(__name__)

CARD = """---
library_name: transformers
base_model: {base}
tags: [latent-reasoning, vision-language, {family}]
---

# {name}

A {family} model that reasons in latent tokens: `{start}`, {k} latent states that are fed back as they are, `{end}`,
then the answer in `<answer>…</answer>`. Trained by `{job}` from `{base}`, {steps} optimizer steps.

Plain transformers loads the weights. To decode *with* latents, the last hidden state (after the final norm) must be fed
back as the next input embedding at each `{latent}`; `realvr evaluate` does that inside vLLM.

The configuration of the run stands in `realvr.yaml` beside this file.
"""


def export_checkpoint(source: Path, folder: Path) -> Path:
    """Write a checkpoint of a training run to `folder`.

    source: a checkpoint folder, or a run folder (its best checkpoint by validation, else its newest). Needs memory for
    the whole model on this machine. UserError when there is no checkpoint or `folder` is in use.
    """
    checkpoint = find_checkpoint(source)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; name a new folder")
    settings = load_config(checkpoint.path / "config.yaml")
    if not isinstance(settings, RLSettings | SftSettings):
        raise UserError(f"{checkpoint.path}: a checkpoint of job {settings.job}; realvr.rl and realvr.sft have models")
    policy = load_policy(settings.model)
    tensors = dict(policy.checkpoint_tensors(_root_tensors(checkpoint))) | dict(policy.tower_tensors())
    builder = PromptBuilder(settings.model.path, settings.model.min_visual_tokens, settings.model.max_visual_tokens)
    _save_model(settings.model.path, tensors, folder)
    builder.processor.save_pretrained(folder)
    _write_card(checkpoint, settings, policy, folder)
    log.info("exported step %d of %s to %s", checkpoint.step, settings.name, folder)
    return folder


def find_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint that `source` means: itself, or a run's best, or its newest."""
    if not (source / "checkpoints").is_dir():
        return read_checkpoint(source)
    store = CheckpointStore(source / "checkpoints")
    found = store.best() or store.latest()
    if found is None:
        raise UserError(f"{source}: this run has no checkpoint yet; it saves one every checkpoint.every steps")
    return found


def _root_tensors(checkpoint: Checkpoint) -> list[tuple[str, torch.Tensor]]:
    """Whole float32 tensors of the policy root, from the shards of all ranks."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()):  # DeepSpeed prints what concerns its developers
        whole = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.path / "learner"), tag=SHARDS)
    found = [(name.removeprefix("root."), t) for name, t in whole.items() if name.startswith("root.")]
    if not found:
        raise UserError(f"{checkpoint.path}: its shards hold no policy; is it a checkpoint of realvr.rl or realvr.sft?")
    return found


def _save_model(base: str, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the tensors under their saved names, in shards of 5 GB, beside the base model's configuration files."""
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoConfig, GenerationConfig

    files = checkpoint_folder(base)
    expected = checkpoint_shapes(files)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
        raise RuntimeError(f"export: {len(differing)} tensors do not match those of {base}: {differing[:3]}")
    config = AutoConfig.from_pretrained(files)
    dtype = config.dtype or torch.float32
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    if (Path(files) / "generation_config.json").exists():
        GenerationConfig.from_pretrained(files).save_pretrained(folder)
    save_torch_state_dict({name: t.to(dtype).contiguous() for name, t in tensors.items()}, folder)


def _write_card(checkpoint: Checkpoint, settings: RLSettings | SftSettings, policy: Policy, folder: Path) -> None:
    card = CARD.format(
        base=settings.model.path,
        family=policy.family.name,
        name=settings.name,
        job=settings.job,
        steps=checkpoint.step,
        k=settings.latent.k,
        start=START,
        latent=LATENT,
        end=END,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / "realvr.yaml").write_text((checkpoint.path / "config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
