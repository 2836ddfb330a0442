"""`realvr base`: teach a tiny random model the generated worlds, so that it can stand in for a pretrained one.

First the vision tower, alone, by a linear probe; then, tower frozen, the language model on question → answer with the
real prompts and no latents. Plain torch in one process. A seed that does not learn is replaced by the next.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from launch.engine import lr_at
from launch.errors import UserError
from launch.runs import Run
from realvr.config import BaseSettings, SourceSettings
from realvr.data.examples import Example
from realvr.data.prompts import PromptBuilder
from realvr.data.sources.digits import Digits
from realvr.data.sources.scenes import SceneWorld
from realvr.data.sources.shapes import Shapes
from realvr.families.base import ModelParts
from realvr.train.packs import Packs, build_packs, load_pictures, packed_states, see
from realvr.train.tower import train_tower

log = logging.getLogger(__name__)

LARGEST = 20_000_000  # parameters; beyond it, start from a pretrained checkpoint
WINDOW = 100  # steps over which training accuracy is averaged
Report = Callable[[str, dict[str, float]], None]  # phase, metrics of one step


class _Stopped(Exception):
    """Somebody asked the run to stop."""


def run_base(settings: BaseSettings, run: Run) -> None:
    """The job: writes a transformers checkpoint to `<run folder>/model`. UserError when no seed reaches the target.

    There are no checkpoints on the way: a run that was stopped begins anew.
    """
    run.configure(headline=("base/accuracy", "probe/noun_accuracy"))
    per_attempt = settings.probe.steps + settings.steps

    def report(phase: str, metrics: dict[str, float]) -> None:
        # One step more than planned is always to come: which one is the last is known only afterwards.
        run.plan((run.done // per_attempt + 1) * per_attempt + 1)
        if run.finish(run.done, {f"{phase}/{name}": value for name, value in metrics.items()}):
            raise _Stopped

    with contextlib.suppress(_Stopped):
        metrics = train_base(settings, run.folder / "model", report)
        run.plan(run.done + 1)
        run.finish(run.done, {f"validation/{name}": value for name, value in metrics.items()})


def train_base(settings: BaseSettings, folder: Path, report: Report) -> dict[str, float]:
    """Train up to `attempts` seeds; save the first that reaches the target and return its metrics."""
    builder = PromptBuilder(settings.model.path, settings.model.min_visual_tokens, settings.model.max_visual_tokens)
    world = open_world(settings.data.train)
    validation = open_world(settings.data.validation or settings.data.train.model_copy(update={"seed": 2**31}))
    best = -1.0
    for attempt in range(settings.attempts):
        torch.manual_seed(settings.seed + attempt)
        model = _fresh_model(builder)
        metrics = _attempt(settings, settings.seed + attempt, model, builder, world, validation, report)
        metrics["attempt"] = attempt
        if metrics["accuracy"] >= settings.target_accuracy:
            folder.mkdir(parents=True, exist_ok=True)
            model.save_pretrained(folder)
            builder.processor.save_pretrained(folder)
            return metrics
        best = max(best, metrics["accuracy"])
        log.warning(
            "seed %d reached accuracy %.3f, below %.2f", settings.seed + attempt, best, settings.target_accuracy
        )
    raise UserError(
        f"base: {settings.attempts} seeds from {settings.seed} on reached accuracy {best:.3f} at most, target_accuracy "
        f"is {settings.target_accuracy}; raise steps or attempts, or lower the target"
    )


def open_world(source: SourceSettings) -> SceneWorld:
    """The generated set; other kinds of data are refused."""
    worlds = {"shapes": Shapes, "digits": Digits}
    if source.kind not in worlds:
        raise UserError(f"data: the base phase learns generated worlds ({', '.join(worlds)}), not {source.kind!r}")
    return worlds[source.kind](source)


def _fresh_model(builder: PromptBuilder) -> torch.nn.Module:
    """Random float32 weights for the checkpoint's configuration, from torch's current seed."""
    from transformers import AutoModelForImageTextToText

    path = builder.processor.tokenizer.name_or_path
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForImageTextToText.from_config(builder.config).parameters())
    if count > LARGEST:
        raise UserError(
            f"{path}: {count / 1e6:.0f} M parameters; the base phase trains tiny models from scratch (at most "
            f"{LARGEST / 1e6:.0f} M): use the pretrained checkpoint as it is and go on with `realvr sft`"
        )
    model = AutoModelForImageTextToText.from_config(builder.config, dtype=torch.float32)
    model.generation_config.eos_token_id = builder.ids.eos[0]
    model.generation_config.pad_token_id = builder.ids.pad
    return model


def _attempt(
    settings: BaseSettings,
    seed: int,
    model: torch.nn.Module,
    builder: PromptBuilder,
    world: SceneWorld,
    held_out: SceneWorld,
    report: Report,
) -> dict[str, float]:
    """Train one seed. The metrics of its end: validation accuracy, steps, seconds of each phase."""
    parts, times = builder.family.parts(model), [time.perf_counter()]
    questions = _whole_scenes(world, len(world))
    scenes = questions[:: world.options.questions_per_scene]
    pictures = load_pictures(builder, scenes)
    times.append(time.perf_counter())
    train_tower(parts.tower, builder, world, scenes, pictures, settings.probe, lambda m: report("probe", m))
    times.append(time.perf_counter())
    seen = see(builder.family, parts.tower, pictures)
    packs = build_packs(questions, world.options.questions_per_scene, seen, builder)
    done = _train(settings, seed, model, parts, builder, packs, report)
    times.append(time.perf_counter())
    seconds = dict(zip(("load_s", "probe_s", "train_s"), (b - a for a, b in pairwise(times)), strict=True))
    per_scene = held_out.options.questions_per_scene
    questions = _whole_scenes(held_out, settings.data.validation_size)
    seen = see(builder.family, parts.tower, load_pictures(builder, questions[::per_scene]))
    return {
        "accuracy": accuracy(parts, builder, build_packs(questions, per_scene, seen, builder)),
        "steps": done,
    } | seconds


def _whole_scenes(world: SceneWorld, count: int) -> list[Example]:
    """The first examples of a world, `count` at most and a whole number of scenes (one at least)."""
    per_scene = world.options.questions_per_scene
    if len(world) < per_scene:
        raise UserError(f"data: size {len(world)} is less than questions_per_scene {per_scene}; raise size")
    return world[: max(per_scene, min(count, len(world)) // per_scene * per_scene)]


def _train(
    settings: BaseSettings,
    seed: int,
    model: torch.nn.Module,
    parts: ModelParts,
    builder: PromptBuilder,
    packs: Packs,
    report: Report,
) -> int:
    """Text cross-entropy until the steps are spent or training accuracy suffices; the number of steps taken."""
    trained = [p for p in model.parameters() if p.requires_grad]
    o = settings.optimizer
    optimizer = torch.optim.AdamW(trained, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True)
    draw = torch.Generator().manual_seed(seed)
    window: list[float] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, settings.steps, o)
        rows = torch.randint(len(packs), (settings.images_per_step,), generator=draw)
        states, labels, question = packed_states(builder.family, parts, packs, rows)
        logits = parts.lm_head(states)
        # Summed over an answer's tokens, averaged over questions: the answer's length does not change its weight.
        loss = cross_entropy(logits, labels, reduction="sum") / (len(rows) * packs.counted.shape[1])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, o.clip)
        optimizer.step()
        window.append(_share_right(logits, labels, question, packs.counted[rows]))
        recent = sum(window[-WINDOW:]) / len(window[-WINDOW:])
        report("base", {"loss": loss.item(), "accuracy": recent, "grad_norm": float(norm)})
        if len(window) >= WINDOW and recent >= settings.stop_accuracy:
            return step + 1
    return settings.steps


@torch.no_grad()
def accuracy(parts: ModelParts, builder: PromptBuilder, packs: Packs, batch: int = 16) -> float:
    """Share of the counted questions whose every answer token, tags and end of turn included, is the greedy choice."""
    total = right = 0.0
    for rows in torch.arange(len(packs)).split(batch):
        states, labels, question = packed_states(builder.family, parts, packs, rows)
        counted = packs.counted[rows]
        right += _share_right(parts.lm_head(states), labels, question, counted) * int(counted.sum())
        total += int(counted.sum())
    return right / total


def _share_right(logits: torch.Tensor, labels: torch.Tensor, question: torch.Tensor, counted: torch.Tensor) -> float:
    """Share of the counted questions [B, n] that have no wrong token. question: [M], each token's question b·n + q."""
    wrong = (logits.argmax(-1) != labels).float()
    faults = torch.zeros(counted.numel()).index_add_(0, question, wrong)
    return (faults[counted.flatten()] == 0).float().mean().item()
