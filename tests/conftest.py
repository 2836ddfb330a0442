"""Fixtures for every room: tiny checkpoints built from config, and a machine kept quiet and offline."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("WANDB_SILENT", "true")

from pathlib import Path

import pytest


def _tiny(tmp_path_factory: pytest.TempPathFactory, family: str, size: str) -> Path:
    from realvr.families import get_family

    folder = tmp_path_factory.mktemp(f"{family}-{size}")
    get_family(family).tiny(str(folder), size, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL of size `test`."""
    return _tiny(tmp_path_factory, "qwen2_5_vl", "test")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL of size `test`."""
    return _tiny(tmp_path_factory, "qwen3_vl", "test")


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL of size `demo`."""
    return _tiny(tmp_path_factory, "qwen2_5_vl", "demo")
