"""Edit pairs as a report shows them, and the wrong answers that readouts are contrasted with."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realvr.data.boxes import normalised
from realvr.data.images import load_image
from realvr.data.twins import Twin
from realvr.evaluate.items import Decoded
from realvr.evaluate.latents import Look, Transplanted, looks
from realvr.evaluate.probe import Probe
from realvr.rewards.answers import plain

_CANDIDATES = 12  # wrong answers whose probability is compared


def wrong_candidates(items: Sequence[Decoded], everything: Sequence[Decoded]) -> list[list[str]]:
    """Wrong answers of each item: what it said if wrong, its options, then the set's other golds, commonest first."""
    counts: dict[str, int] = {}
    for d in everything:
        counts[d.example.answer] = counts.get(d.example.answer, 0) + 1
    common = sorted(counts, key=lambda name: (-counts[name], name))
    out = []
    for d in items:
        gold = plain(d.example.answer)
        options: Sequence[str] = d.example.options
        if d.example.kind == "choice" and len(gold) == 1:
            options = [chr(65 + i) for i in range(len(options))]
        own = [d.lenient] if d.lenient and not d.right_lenient else []
        rest = [] if d.example.kind == "choice" else common
        distinct: dict[str, str] = {}
        for name in (*own, *options, *rest):
            distinct.setdefault(plain(name), name)
        distinct.pop(gold, None)
        out.append(list(distinct.values())[:_CANDIDATES])
    return out


def picture_pairs(
    probe: Probe, folder: Path, kept: Sequence[tuple[Twin, Transplanted]], k: int, batch: int
) -> list[dict[str, Any]]:
    """Edit pairs with what their pictures need; images go to pictures/."""
    twins = [t for t, _ in kept]
    before = looks(probe, [t.before for t in twins], [[t.after.answer] for t in twins], k, batch)
    after = looks(probe, [t.after for t in twins], [[t.before.answer] for t in twins], k, batch)
    (folder / "pictures").mkdir(exist_ok=True)
    found = []
    for (twin, moved), *pair in zip(kept, before, after, strict=True):
        images, boxes = [], []
        for when, example in (("before", twin.before), ("after", twin.after)):
            picture = load_image(example.images[0], example.id)
            boxes.append([normalised(b, *picture.size) for b in example.boxes if b.image == 0])
            picture.thumbnail((384, 384))
            name = re.sub(r"[^\w.-]", "_", f"{twin.before.id}-{when}.png")
            picture.save(folder / "pictures" / name)
            images.append(f"pictures/{name}")
        found.append({
            "id": twin.before.id, "edit": twin.edit, "question": twin.before.question,
            "gold": [twin.before.answer, twin.after.answer], "images": images, "boxes": boxes,
            "edited": twin.after.meta.get("edited", []), "looks": [_look(look) for look in pair],
            "transplant": {"answers": moved.answers, "margins": moved.margins},
        })  # fmt: skip
    return found


def _look(look: Look) -> dict[str, Any]:
    return {
        "answer": look.answer,
        "right": look.right.round(6).tolist(),
        "wrong": look.wrong.round(6).tolist(),
        "similarity": look.similarity.round(4).tolist(),
    }
