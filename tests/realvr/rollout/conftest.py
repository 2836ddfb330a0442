"""One vLLM engine at a time, shared by a module's tests: starting one costs 25 s."""

from pathlib import Path

import pytest

from realvr.data.examples import Example
from tests.realvr.rollout import world


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    return world.examples(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def fluent25(tiny_qwen25: Path, asked: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Qwen2.5-VL that opens and closes spans by itself."""
    return world.fluent(tiny_qwen25, tmp_path_factory.mktemp("fluent") / "qwen25", asked)


@pytest.fixture(scope="session")
def fluent3(tiny_qwen3: Path, asked: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Qwen3-VL that opens and closes spans by itself."""
    return world.fluent(tiny_qwen3, tmp_path_factory.mktemp("fluent") / "qwen3", asked)
