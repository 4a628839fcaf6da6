"""Tries to break programs that run while a context lasts."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.system.command import end_process, running
from support.processes import ended, wait_until

pytestmark = pytest.mark.usefixtures("no_child_is_left")
SECRET = "s3cr3t-pässword"


def test_running_program_is_ended_when_the_context_ends(tmp_path):
    with (tmp_path / "log").open("wb") as log, running(["sh", "-c", "echo up; sleep 60"], output=log) as process:
        wait_until(lambda: (tmp_path / "log").read_text() == "up\n")
        assert process.poll() is None
    assert process.returncode == -signal.SIGTERM


def test_running_program_is_ended_on_an_exception(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        with pytest.raises(ZeroDivisionError), running(["sleep", "60"], output=log) as process:
            _ = 1 / 0
        assert process.returncode is not None


def test_running_program_that_ends_by_itself_is_no_error(tmp_path):
    with (tmp_path / "log").open("wb") as log, running(["false"], output=log) as process:
        wait_until(lambda: process.poll() is not None)
    assert process.returncode == 1


def test_running_what_is_missing(tmp_path):
    with (
        (tmp_path / "log").open("wb") as log,
        pytest.raises(MissingRequirementError),
        running(["/no/such"], output=log),
    ):
        pass


def test_death_with_the_parent(tmp_path):
    # What `running` documents for callers: the server dies with us even on SIGKILL.
    log = tmp_path / "log"
    parent = f"""
import sys, time
from snapmgr.system.command import running
argv = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", "echo $$; sleep 60"]
with open({str(log)!r}, "wb") as out, running(argv, output=out):
    time.sleep(60)
"""
    with (tmp_path / "own").open("wb") as own, running([sys.executable, "-c", parent], output=own) as process:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
        process.kill()
        process.wait()
    pid = int(log.read_text())
    wait_until(lambda: ended(pid))


def test_ending_a_process_that_was_reaped_signals_nobody(tmp_path):
    with (tmp_path / "log").open("wb") as log, running(["true"], output=log) as process:
        process.wait()
        began = time.monotonic()
        end_process(process)
    assert time.monotonic() - began < 2
