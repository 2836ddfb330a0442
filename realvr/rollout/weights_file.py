"""Weights on their way from learner to rollout: a safetensors file, its checksum, and the check before it is loaded."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import UserError

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]


def file_checksum(path: str | Path) -> str:
    """sha256 of the file's bytes, hexadecimal: what writer and reader of a weights file compare."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_weights(path: str | Path, tensors: Mapping[str, "torch.Tensor"]) -> str:
    """Write tensors (checkpoint name → whole tensor) and return the file's checksum."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, str(path))
    return file_checksum(path)


def tensor_shapes(path: str | Path) -> Shapes:
    """Names and shapes in a safetensors file, from its header alone."""
    with Path(path).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def checkpoint_folder(model_path: str) -> Path:
    """Local folder of a checkpoint's safetensors: the path itself, or the hub id's snapshot (fetched if need be)."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_path, allow_patterns=["*.safetensors", "*.json"]))


def checkpoint_shapes(folder: str | Path) -> Shapes:
    """Names and shapes of all tensors of a checkpoint folder. UserError when it holds no safetensors."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors file there; save the checkpoint with save_pretrained()")
    return {name: shape for file in files for name, shape in tensor_shapes(file).items()}


def check_weights(path: str | Path, checksum: str, expected: Shapes, optional_prefix: str) -> None:
    """Stop unless the file is the one that was written and holds the whole model.

    Every name of `expected` must be there with its shape and no other; names below `optional_prefix` (the frozen vision
    tower) may be left out, all together. Raises UserError.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: weights file not found; the learner writes it before a sync, on the same host")
    found = file_checksum(path)
    if found != checksum:
        raise UserError(f"{path}: checksum is {found[:12]}…, the learner announced {checksum[:12]}…; write it again")
    held = tensor_shapes(path)
    frozen = {name for name in expected if name.startswith(optional_prefix)}
    required = set(expected) if frozen & set(held) else set(expected) - frozen
    missing, unknown = sorted(required - set(held)), sorted(set(held) - set(expected))
    wrong = sorted(name for name in required & set(held) if held[name] != expected[name])
    for what, names in (("lacks", missing), ("has unknown", unknown), ("has another shape for", wrong)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{path}: the weights file {what} {', '.join(names[:3])}{more}; "
                f"it must hold the checkpoint's {len(expected)} tensors under their saved names"
            )
