"""Model families, one file each. `family_of` picks one by a checkpoint's config.json."""

import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from launch.errors import UserError
from realvr.families.base import Family

_FAMILIES = {
    "qwen2_5_vl": ("realvr.families.qwen2_5_vl", "Qwen25VL"),
    "qwen3_vl": ("realvr.families.qwen3_vl", "Qwen3VL"),
}


def family_names() -> tuple[str, ...]:
    """Names that `get_family` knows."""
    return tuple(_FAMILIES)


@cache
def get_family(name: str) -> Family:
    """The family called `name`; UserError lists the names when it is unknown."""
    if name not in _FAMILIES:
        raise UserError(f"family: unknown model family {name!r}; supported are {', '.join(_FAMILIES)}")
    module, cls = _FAMILIES[name]
    return getattr(import_module(module), cls)()


def read_config(model_path: str | Path) -> dict[str, Any]:
    """config.json of a local folder or a hub id (fetched, or from the cache when offline) as a dict."""
    model_path = str(model_path)
    folder = Path(model_path)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(
                f"{model_path}: no config.json there; a checkpoint folder holds one (see `realvr init-tiny`)"
            )
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", model_path) and not folder.parent.is_dir():
        file = _hub_config(model_path)
    else:
        raise UserError(
            f"{model_path}: no such checkpoint folder; give a folder with config.json or a hub id owner/name"
        )
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); restore the checkpoint's config.json") from error


def _hub_config(model_path: str) -> Path:
    from transformers.utils import cached_file

    try:
        return Path(cached_file(model_path, "config.json"))
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{model_path}: neither a local folder nor reachable on the hub ({reason})") from error


def family_of(model_path: str | Path) -> Family:
    """The family of a checkpoint by the architectures in its config.json (local folder or hub id)."""
    found = read_config(model_path).get("architectures") or []
    for name in _FAMILIES:
        family = get_family(name)
        if set(found) & set(family.architectures):
            return family
    known = ", ".join(a for name in _FAMILIES for a in get_family(name).architectures)
    raise UserError(f"{model_path}: config.json names {found or 'no architecture'}; supported are {known}")
