"""Checkpoints: complete or not there, whatever happens while they are written."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.checkpoints import CheckpointStore, expect, read_checkpoint, verify
from launch.errors import UserError
from launch.files import disk_is_full
from tests.launch import toy


def writer(text: str = "weights"):
    def write(folder: Path) -> dict:
        (folder / "rank0").mkdir()
        (folder / "rank0" / "w.bin").write_text(text)
        return {"rng": [1, 2]}

    return write


def test_save_and_read_back(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    saved = store.save(25, writer(), {"model": "m"}, run={"best": None})
    assert saved == store.latest() == read_checkpoint(tmp_path / "checkpoints" / "step-000025")
    assert (saved.step, saved.state, saved.run) == (25, {"model": "m", "rng": [1, 2]}, {"best": None})
    assert saved.size == len("weights")
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000025\n"
    assert verify(saved) == []


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(step, writer())
        if step == 2:
            store.mark_best(2)
    store.save(10**6, writer())  # a seven-digit step sorts as a number
    assert store.steps() == [2, 3, 10**6]
    assert store.best().step == 2
    store.mark_best(10**6)
    assert store.steps() == [3, 10**6]
    assert store.latest().step == 10**6


def test_broken_checkpoints_are_passed_over(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        store.save(step, writer())
    (tmp_path / "step-000004" / "rank0" / "w.bin").unlink()
    (tmp_path / "step-000003" / "state.json").write_text('{"format": 1')
    (tmp_path / "step-000002" / "rank0" / "w.bin").write_text("weighty")  # same length, other content
    assert store.latest().step == 2
    assert "w.bin: is missing" in caplog.text
    assert "state.json: cannot be read" in caplog.text
    assert verify(store.latest()) == [
        f"{Path('rank0/w.bin')}: checksum {crc('weighty')}, the manifest says {crc('weights')}"
    ]
    assert store.newest_sound().step == 1


def crc(text: str) -> str:
    import zlib

    return f"{zlib.crc32(text.encode()):08x}"


def test_without_checksums_sizes_are_compared(tmp_path):
    store = CheckpointStore(tmp_path, checksums=False)
    store.save(1, writer())
    (tmp_path / "step-000001" / "rank0" / "w.bin").write_text("weighty")
    assert verify(store.latest()) == []
    (tmp_path / "step-000001" / "rank0" / "w.bin").write_text("weight")
    with pytest.raises(UserError, match="has 6 bytes; the checkpoint's manifest says 7 bytes"):
        read_checkpoint(tmp_path / "step-000001")


@pytest.mark.parametrize("moment", ["write", "rename", "latest"])
def test_kill_9_at_every_moment_of_a_save(tmp_path, moment):
    code = f"""
import os, signal
from pathlib import Path
import launch.checkpoints as checkpoints
from tests.launch.test_checkpoints import writer
store = checkpoints.CheckpointStore(Path({str(tmp_path)!r}))
store.save(1, writer())
def kill(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
if {moment!r} == "rename":      # all is written and flushed, the folder still has its other name
    Path.rename = kill
if {moment!r} == "latest":      # renamed, `latest` still names the former one
    checkpoints.write_atomic = kill
def write(folder):
    writer()(folder)
    if {moment!r} == "write":
        kill()
store.save(2, write)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=toy.REPOSITORY, check=False)
    assert done.returncode == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    complete = moment == "latest"
    assert store.steps() == ([1, 2] if complete else [1])
    assert store.newest_sound().step == (2 if complete else 1)
    assert complete or list(tmp_path.glob("*.tmp-*"))
    assert store.save(2, writer("again")).step == 2
    assert store.steps() == [1, 2]
    assert not list(tmp_path.glob("*.tmp-*"))
    assert (store.latest().path / "rank0" / "w.bin").read_text() == "again"


def full_disk(error: BaseException):
    def write(folder: Path) -> None:
        (folder / "part.bin").write_bytes(b"0" * 1000)
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),  # safetensors
        RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/4"),
    ],
)
def test_a_full_disk_leaves_the_former_checkpoint(tmp_path, error):
    store = CheckpointStore(tmp_path / "c")
    store.save(1, writer())
    with pytest.raises(UserError) as caught:
        store.save(2, full_disk(error))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'c'}: the disk is full, the checkpoint of step 2 was not written")
    assert "the last one took 7 B" in message
    assert "the checkpoint of step 1 stays the latest" in message
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["latest", "step-000001"]
    assert store.newest_sound().step == 1


def test_a_full_disk_in_a_worker_of_ray_is_recognised():
    outer = RuntimeError("task failed")
    outer.cause = OSError(errno.ENOSPC, "full")
    assert disk_is_full(outer)
    assert not disk_is_full(OSError(errno.EACCES, "no"))


def test_a_really_full_file_system(tmp_path):
    """A file system of 64 kB, where the process may mount one."""
    script = f"""
set -e
mount -t tmpfs -o size=64k none {tmp_path}
exec {sys.executable} -c '
from pathlib import Path
from launch.checkpoints import CheckpointStore
from launch.errors import UserError
store = CheckpointStore(Path("{tmp_path}/c"))
store.save(1, lambda folder: (folder / "w").write_bytes(b"0" * 20000) and None)
try:
    store.save(2, lambda folder: (folder / "w").write_bytes(b"0" * 60000) and None)
except UserError as error:
    print(error)
print(store.newest_sound().step, [p.name for p in Path("{tmp_path}/c").glob("*.tmp-*")])
store.save(3, lambda folder: (folder / "w").write_bytes(b"0" * 10000) and None)
print(store.newest_sound().step)
'
"""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, cwd=toy.REPOSITORY, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "the disk is full, the checkpoint of step 2 was not written" in lines[0]
    assert lines[1:] == ["1 []", "3"]


def test_any_other_error_passes_through_and_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(ValueError, match="mine"):
        store.save(2, full_disk(ValueError("mine")))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.save(3, lambda folder: (folder / "w").write_bytes(b"0" * 2000) and None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, former)
    assert list(tmp_path.iterdir()) == []


def test_a_job_may_not_write_the_state_file(tmp_path):
    with pytest.raises(ValueError, match=r"must not write state\.json"):
        CheckpointStore(tmp_path).save(1, lambda folder: (folder / "state.json").write_text("{}") and None)


def test_expect(tmp_path):
    expect({"model": "a"}, "model", "a", "checkpoint x")
    with pytest.raises(UserError, match="checkpoint x: the checkpoint has model 'a', this run has 'b'"):
        expect({"model": "a"}, "model", "b", "checkpoint x")
    with pytest.raises(UserError, match="does not say which family"):
        expect({"model": "a"}, "family", "b", "checkpoint x")


def test_the_manifest_lists_every_file(tmp_path):
    saved = CheckpointStore(tmp_path).save(1, writer())
    files = json.loads((saved.path / "state.json").read_text())["files"]
    assert files == {os.path.join("rank0", "w.bin"): {"size": 7, "crc32": crc("weights")}}  # noqa: PTH118
