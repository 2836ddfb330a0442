"""Batch scripts without SLURM: what they ask for, what they refuse, and that the plain ones are up to date."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from launch.config import load_config
from launch.errors import UserError
from launch.slurm import Profile, load_profile, nodes_needed, render, render_plain, salloc_options, submit
from tests.launch import toy

PROFILES = ("generic", "frontier", "lumi", "perlmutter")
ACCOUNT = {"frontier": "abc", "lumi": "abc", "perlmutter": "abc"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(toy.install(tmp_path / "site")))
    (tmp_path / "t.yaml").write_text("job: toy.train\nname: a/toy\n")
    return tmp_path


def script(profile_name, here, *changes, chain=False, command="run"):
    settings = load_config(here / "t.yaml")
    return render(settings, load_profile(profile_name, changes), profile_name, 2, command, chain)


def is_bash(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("requeue", ["scontrol", "chain", "none"])
def test_every_profile_gives_a_script_that_bash_reads(name, chain, requeue, here):
    text = script(name, here, f"requeue={requeue}", chain=chain)
    assert is_bash(text)
    assert "{{" not in text
    assert "{%" not in text
    assert ("scontrol requeue" in text) == (requeue == "scontrol" and not chain)
    assert ("#SBATCH --requeue" in text) == (requeue == "scontrol")
    assert ("scancel --user" in text) == (chain and requeue != "none")


def test_what_a_script_asks_for_and_does(here):
    text = script("lumi", here, "account=project_1", "reservation=r")
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = ["--job-name=a-toy", "--nodes=2", "--ntasks-per-node=1", "--account=project_1", "--partition=standard-g"]
    wanted += ["--reservation=r", "--gpus-per-node=8", "--exclusive", "--time=12:00:00", "--signal=B:USR1@600"]
    wanted += ["--requeue", "--open-mode=append", f"--output={here}/runs/a/toy/slurm/slurm-%j.out", "--export=NONE"]
    assert asked == [*wanted, "--mem=0"]
    for part in (
        'export NCCL_NET="AWS Libfabric"',
        f"CONFIG={here}/runs/a/toy/slurm/config.yaml",
        f"SCRIPT={here}/runs/a/toy/slurm/job.sh",
        "export LAUNCH_SIGNAL_LEAD_S=600",
        "--interface hsn0 --cpus 56 --gpus 8",
        "--kill-on-bad-exit=1",
        "trap 'asked=USR1' USR1",
        "trap 'asked=TERM' TERM",
        "${SLURM_RESTART_COUNT:-0}",
    ):
        assert part in text, part
    assert salloc_options(text)[:3] == ["--job-name=a-toy", "--nodes=2", "--ntasks-per-node=1"]
    assert not [option for option in salloc_options(text) if re.match("--(signal|output|export|requeue)", option)]


def test_values_are_quoted_for_the_shell(here):
    text = script("generic", here, "env={A: 'x \"y\" `id` $HOME'}")
    line = next(line for line in text.splitlines() if line.startswith("export A="))
    done = subprocess.run(["bash", "-c", f'{line}; printf %s "$A"'], env={"HOME": "/h"}, capture_output=True, text=True)
    assert done.stdout == 'x "y" `id` /h'


def test_preflight_is_not_requeued(here):
    text = script("generic", here, command="preflight --profile x.yaml")
    assert is_bash(text)
    assert "launch.cli preflight --profile x.yaml" in text
    assert "scontrol requeue" not in text


@pytest.mark.parametrize("name", PROFILES)
def test_the_plain_scripts_are_up_to_date(name):
    path = toy.REPOSITORY / "slurm" / f"{name}.sbatch"
    fresh = render_plain(load_profile(name), name)
    assert is_bash(fresh)
    assert "<<<" in fresh
    assert path.read_text() == fresh, f"write {path.name} anew with launch.slurm.render_plain"


def test_nodes_follow_from_the_footprint(here, monkeypatch):
    settings = load_config(here / "t.yaml")
    needs = {"cpus": 3, "gpus": 16}
    monkeypatch.setattr("launch.slurm.get_job", lambda name: toy.job().__class__("x", None, None, lambda s: needs))
    assert nodes_needed(settings, Profile(gpus_per_node=8), None) == 2
    assert nodes_needed(settings, Profile(gpus_per_node=4), 6) == 6
    assert nodes_needed(settings, Profile(gpus_per_node=16, cpus_per_node=2), None) == 2
    with pytest.raises(UserError, match=r"--nodes 2 is too few: the run wants 16 gpus, 4 a node, so 4 nodes"):
        nodes_needed(settings, Profile(gpus_per_node=4), 2)
    with pytest.raises(UserError, match="wants 16 GPUs, the profile has gpus_per_node 0"):
        nodes_needed(settings, Profile(), None)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("lumy", [], "profile 'lumy' is unknown; did you mean 'lumi'?"),
        ("lumi", ["acount=x"], "acount is unknown; did you mean 'account'?"),
        ("lumi", ["time_limit=soon"], "time_limit"),
        ("lumi", ["env={WANDB_API_KEY: abc}"], r"env.WANDB_API_KEY looks like a secret.*secrets_file"),
        ("lumi", ["env={'A;id': abc}"], "env has 'A;id', which is no name of a variable"),
    ],
)
def test_a_profile_that_cannot_be_meant(name, changes, said, here):
    with pytest.raises(UserError, match=said) as caught:
        load_profile(name, changes)
    assert "\n" not in str(caught.value)


def test_submitting_without_an_account_or_without_slurm(here, monkeypatch, capsys):
    with pytest.raises(UserError, match="wants an account: --set account=YOUR_PROJECT"):
        submit(Path("t.yaml"), [], "frontier")
    submit(Path("t.yaml"), [], "frontier", ["account=abc"], nodes=2, dry_run=True)
    assert capsys.readouterr().out.startswith("#!/bin/bash\n# Run 'a/toy' (toy.train) on 2 nodes, profile frontier")
    assert not Path("runs").exists()
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(UserError, match="sbatch is not installed here: submit from a login node"):
        submit(Path("t.yaml"), [], "generic")
    assert "job: toy.train" in Path("runs/a/toy/slurm/config.yaml").read_text()
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: find(name, *more) if name != "ray" else None)
    with pytest.raises(UserError, match=r"has no Ray \(a light install\).*--set python=/path/to/python"):
        submit(Path("t.yaml"), [], "generic")
