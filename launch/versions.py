"""What ran: interpreter, packages, commit of the code, command line."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def describe_versions() -> dict[str, Any]:
    """What a run folder keeps in `versions.json`. Imports nothing heavy and needs no git."""
    packages = {dist.metadata["Name"]: dist.version for dist in distributions() if dist.metadata["Name"]}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "code": code_commit(Path(__file__).parent),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def code_commit(folder: Path) -> dict[str, Any] | None:
    """`{"commit", "dirty"}` of the checkout that tracks `folder`; None when it is installed from elsewhere."""
    # A virtual environment inside somebody's repository is not that repository's code: the file must be tracked.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
