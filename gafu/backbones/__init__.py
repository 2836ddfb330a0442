"""Unified backbones, one file each. `load_backbone` picks one by a checkpoint's config.json."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gafu.config import BackboneSettings
from launch.errors import UserError

if TYPE_CHECKING:
    import torch

    from gafu.backbones.base import Adapter

_ADAPTERS = {"JanusForConditionalGeneration": ("gafu.backbones.janus", "JanusAdapter")}


def load_backbone(settings: BackboneSettings, device: "torch.device | str" = "cpu") -> "Adapter":
    """The checkpoint's adapter, frozen, on a device. UserError when it cannot be read or is of no known kind."""
    module, name = _ADAPTERS[_architecture(settings.path)]
    adapter = getattr(import_module(module), name).load(settings)
    adapter.to(device)
    adapter.checkpoint_layers(settings.gradient_checkpointing)
    return adapter


def dry_backbone(settings: BackboneSettings) -> "Adapter":
    """The same from config.json alone, on the meta device: sizes and names without weights."""
    module, name = _ADAPTERS[_architecture(settings.path)]
    return getattr(import_module(module), name).dry(settings)


def _architecture(path: str) -> str:
    found = read_config(path).get("architectures") or []
    known = [name for name in found if name in _ADAPTERS]
    if not known:
        raise UserError(
            f"{path}: config.json names {', '.join(found) or 'no architecture'}, which is no backbone of gafu; "
            f"backbone.path takes a checkpoint of {', '.join(_ADAPTERS)}"
        )
    return known[0]


def read_config(path: str) -> dict[str, Any]:
    """config.json of a local folder or a hub id. UserError when there is none or it is no JSON."""
    folder = Path(path)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"{path}: no config.json there; backbone.path takes a checkpoint folder or a hub id")
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not folder.parent.is_dir():
        from transformers.utils import cached_file

        try:
            file = Path(cached_file(path, "config.json"))
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path}: neither a local folder nor reachable on the hub ({reason})") from error
    else:
        raise UserError(f"{path}: no such folder; backbone.path takes a checkpoint folder or a hub id owner/name")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); restore the checkpoint's config.json") from error
