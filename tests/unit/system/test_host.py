"""A child's end is noticed when it comes, and awaited no longer than asked."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from snapmgr.system.host import await_end, ends_by


@pytest.fixture(params=["pidfd", "without"])
def _kernel(request, monkeypatch):
    """The kernel tells when a child ends, or a container forbids the call."""
    if request.param == "without":

        def refuse(_pid):
            raise PermissionError("seccomp")

        monkeypatch.setattr(os, "pidfd_open", refuse)


def _child(after_s):
    pid = os.fork()
    if pid == 0:
        time.sleep(after_s)
        os._exit(0)
    return pid


@pytest.mark.usefixtures("_kernel")
def test_a_child_that_ends_is_reaped():
    descriptors = os.listdir("/proc/self/fd")
    pid = _child(0.05)
    assert ends_by(pid, time.monotonic() + 30)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    with pytest.raises(ChildProcessError):
        ends_by(pid, time.monotonic() + 30)
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.usefixtures("_kernel")
def test_a_child_that_hangs_is_left_alone():
    pid = _child(60)
    try:
        begun = time.monotonic()
        assert not ends_by(pid, begun + 0.05)
        assert 0.05 <= time.monotonic() - begun < 30
        assert not ends_by(pid, begun)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert ends_by(pid, time.monotonic() + 30)


def test_nobody_asks_again_and_again_where_the_kernel_tells(monkeypatch):
    monkeypatch.setattr(time, "sleep", None)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.kill(pid, signal.SIGKILL)
    assert ends_by(pid, time.monotonic() + 30)


def test_an_end_is_awaited_without_taking_it_from_whom_it_belongs_to():
    with subprocess.Popen(["sleep", "0.05"]) as process:
        await_end(process.pid, time.monotonic() + 30)
        # Nothing is asked: what has ended is there at the first look.
        assert process.poll() == 0
    await_end(process.pid, time.monotonic() + 30)


def test_an_end_that_does_not_come_is_awaited_no_longer_than_asked():
    with subprocess.Popen(["sleep", "60"]) as process:
        begun = time.monotonic()
        await_end(process.pid, begun + 0.05)
        assert 0.05 <= time.monotonic() - begun < 30
        assert process.poll() is None
        process.kill()
