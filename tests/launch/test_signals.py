"""Requests to stop: read at step boundaries, never in the middle."""

import os
import signal
import threading

import pytest

from launch.signals import StopFlag


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_sets_the_flag_and_handlers_come_back(number, reason):
    former = signal.getsignal(number)
    with StopFlag() as stop:
        assert stop.reason() is None
        os.kill(os.getpid(), number)
        assert stop.reason() == reason
    assert signal.getsignal(number) == former


def test_the_second_ctrl_c_interrupts():
    with StopFlag() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason() == "Ctrl-C"
        os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_that_a_library_replaced_is_put_back():
    former = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.arm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason() == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == former


def test_a_stop_file_and_a_stale_one(tmp_path):
    (tmp_path / "STOP").touch()
    with StopFlag(tmp_path) as stop:
        assert stop.reason() is None  # it stopped the attempt before
        (tmp_path / "STOP").touch()
        assert stop.reason() == f"the file {tmp_path / 'STOP'}"


def test_the_first_reason_stays():
    stop = StopFlag()
    stop.request("the time limit")
    stop.request("another")
    assert stop.reason() == "the time limit"


def test_outside_the_main_thread_requests_still_work():
    seen = []

    def work():
        with StopFlag() as stop:
            stop.request("asked")
            seen.append(stop.reason())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["asked"]
