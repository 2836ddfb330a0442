"""A tiny vision tower's own training: every visual token should tell what stands in its quadrant.

A stand-in for vision pre-training. Two linear probes read noun and colour from each merged token; afterwards they are
thrown away and the tower is frozen.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy

from launch.config import OptimizerSettings
from launch.engine import lr_at
from realvr.config import ProbeSettings
from realvr.data.examples import Example
from realvr.data.prompts import PromptBuilder
from realvr.data.sources.scenes import COLOURS, SceneWorld, read_recipe
from realvr.train.packs import Pictures


def train_tower(
    tower: torch.nn.Module,
    builder: PromptBuilder,
    world: SceneWorld,
    scenes: Sequence[Example],
    pictures: Pictures,
    settings: ProbeSettings,
    report: Callable[[dict[str, float]], None],
) -> None:
    """Train the tower in place on the world's scenes and their pictures, then freeze it.

    report(metrics) is called after every step: loss, and the probes' accuracy where something stands.
    """
    width = builder.config.text_config.hidden_size
    vocabularies = ([*world.nouns, ""], [*COLOURS, ""])  # "" is the empty quadrant
    probes = torch.nn.ModuleList(torch.nn.Linear(width, len(words)) for words in vocabularies)
    parameters = [*tower.parameters(), *probes.parameters()]
    schedule = OptimizerSettings(lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01, warmup=20, final_fraction=0.1)
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.lr, betas=schedule.betas, weight_decay=schedule.weight_decay, fused=True
    )
    truth = _token_labels(builder, world, scenes, pictures, vocabularies)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, settings.steps, schedule)
        rows = torch.randint(len(scenes), (settings.images_per_step,))
        seen = builder.family.visual_features(tower, pictures.pixels[rows].flatten(0, 1), pictures.grids[rows]).embeds
        labels = truth[:, rows].flatten(1)
        logits = [probe(seen) for probe in probes]
        pairs = list(zip(logits, labels, strict=True))
        # The embeddings' scale is held near 1: they will stand among word embeddings.
        loss = sum(cross_entropy(x, y) for x, y in pairs) + 0.01 * (seen.square().mean() - 1).square()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        filled = labels[0] < len(world.nouns)
        noun, colour = ((x.argmax(-1) == y)[filled].float().mean().item() for x, y in pairs)
        report({"loss": loss.item(), "noun_accuracy": noun, "colour_accuracy": colour})
    tower.requires_grad_(False)


def _token_labels(
    builder: PromptBuilder,
    world: SceneWorld,
    scenes: Sequence[Example],
    pictures: Pictures,
    vocabularies: tuple[list[str], list[str]],
) -> torch.Tensor:
    """For each merged token the index of its quadrant's noun and colour: [2, S, N]."""
    height, width, merge = builder.family.merged_grid(builder.config, tuple(pictures.grids[0].tolist()))
    rows, columns = height // merge, width // merge
    quadrants = [2 * (t // columns * 2 // rows) + t % columns * 2 // columns for t in range(rows * columns)]
    labels = []
    for scene in scenes:
        cells = read_recipe(scene.images[0], world.prefix).cells
        nouns = [vocabularies[0].index(c.noun if c else "") for c in cells]
        colours = [vocabularies[1].index(c.colour if c else "") for c in cells]
        labels.append([[nouns[q] for q in quadrants], [colours[q] for q in quadrants]])
    return torch.tensor(labels).transpose(0, 1)
