"""A tiny Janus checkpoint and its adapter, shared by the tests of gafu."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_janus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Janus: 64-px pictures, 64 U tokens, VQ latents 8×8×8, four layers of width 64."""
    from gafu.backbones.tiny import write_janus

    folder = tmp_path_factory.mktemp("janus") / "tiny"
    write_janus(folder)
    return folder
