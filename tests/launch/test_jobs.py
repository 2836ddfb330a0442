"""The registry of jobs, through real entry points of an installed distribution."""

import subprocess
import sys

import pytest

from launch.errors import UserError
from launch.jobs import get_job, job_names
from tests.launch import toy


@pytest.fixture(autouse=True)
def toy_jobs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(toy.install(tmp_path / "site")))


def test_a_job_is_found_by_its_name():
    assert "toy.train" in job_names()
    job = get_job("toy.train")
    assert (job.name, job.settings) == ("toy.train", toy.ToySettings)
    assert job.total_steps(toy.ToySettings(steps=7)) == 7
    assert job.footprint(toy.ToySettings())["cpus"] == 1


def test_an_unknown_job_gets_the_nearest_name():
    with pytest.raises(UserError, match=r"job 'toy.trian' is unknown; did you mean 'toy.train'\?"):
        get_job("toy.trian")


def test_a_job_of_a_package_that_is_not_installed():
    with pytest.raises(UserError, match=r"job 'toy.broken' needs the package 'no_such_package'"):
        get_job("toy.broken")


def test_an_entry_point_must_give_a_job():
    with pytest.raises(TypeError, match=r"gives str, not a launch\.jobs\.Job"):
        get_job("toy.wrong")


def test_reading_a_configuration_of_every_installed_job_loads_no_heavy_library():
    code = (
        "import sys, launch.cli, launch.runs, launch.config\n"
        "from launch.jobs import get_job, job_names\n"
        "[get_job(name) for name in job_names() if name.startswith(('realvr.', 'gafu.'))]\n"
        "heavy = ('torch', 'vllm', 'ray', 'deepspeed', 'transformers', 'wandb')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=toy.REPOSITORY)
    assert done.stdout.strip() == "[]"
