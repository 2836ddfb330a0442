"""Every configuration in the repository loads, and the README names only what exists."""

import re
from pathlib import Path

import pytest
import yaml

from launch.config import load_config

ROOT = Path(__file__).parents[1]
FILES = sorted(p.relative_to(ROOT) for p in (ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_loads(file):
    if "job" not in yaml.safe_load((ROOT / file).read_text()) and file.parts[1] == "data":
        pytest.skip("a block of settings, not a run")
    assert load_config(ROOT / file).job


def test_the_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    folders = "configs|docs|slurm|docker|requirements|realvr|launch"
    named = set(re.findall(rf"(?:{folders})/[\w./-]*\.(?:yaml|md|py|txt)", text))
    assert named and not [name for name in named if not (ROOT / name).exists()]
