"""One local Ray for all tests of this folder."""

import pytest

from launch.cluster import open_cluster
from launch.config import ClusterSettings


@pytest.fixture(scope="package")  # Ray is one a process: it must be gone before the next room starts its own
def cluster(tmp_path_factory):
    """Four bundles of 0.45 CPU: 0-1 for group tests, 2-3 for engine tests; 0.2 CPU stay free for who joins."""
    settings = ClusterSettings(num_cpus=2, deadline_s=120)
    with open_cluster(settings, [{"CPU": 0.45}] * 4, tmp_path_factory.mktemp("logs")) as opened:
        yield opened
