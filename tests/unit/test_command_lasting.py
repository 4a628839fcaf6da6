"""Tries to break pipelines, and programs that run while a context lasts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from snapmgr.command import end_process, pipeline, running
from snapmgr.errors import CommandError, LackingError
from support.processes import ended, wait_until

pytestmark = pytest.mark.usefixtures("no_child_is_left")
SECRET = "s3cr3t-pässword"


# ------------------------------------------------------------------------------------------------------------- pipeline


def test_pipeline_returns_the_last_output():
    assert pipeline([["printf", "b\\na\\n"], ["sort"], ["tr", "a", "x"]], timeout_s=5) == b"x\nb\n"


def test_pipeline_of_one():
    assert pipeline([["echo", "x"]], timeout_s=5) == b"x\n"


def test_pipeline_passes_bytes():
    assert pipeline([["printf", r"\377\000\001"], ["cat"]], timeout_s=5) == b"\xff\x00\x01"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_pipeline_fails_with_any_member_and_says_what_it_said(position):
    argvs = [["echo", "x"], ["cat"], ["cat"]]
    argvs[position] = ["sh", "-c", f"cat >/dev/null; echo trouble at {position} >&2; exit 4"]
    with pytest.raises(CommandError, match=rf"exit code 4\): trouble at {position}"):
        pipeline(argvs, timeout_s=5)


def test_pipeline_blames_the_member_that_failed_not_the_one_that_it_broke():
    with pytest.raises(CommandError, match=r"sh -c .* failed \(exit code 9\): disk full"):
        pipeline([["yes"], ["sh", "-c", "head -c 10 >/dev/null; echo disk full >&2; exit 9"], ["cat"]], timeout_s=10)


def test_pipeline_does_not_take_a_broken_pipe_for_success():
    with pytest.raises(CommandError, match="yes failed \\(signal 13\\)"):
        pipeline([["yes"], ["head", "-c", "10"]], timeout_s=10)


def test_pipeline_time_limit_ends_all(tmp_path):
    argvs = [["sh", "-c", f"echo $$ > {tmp_path}/{name}; exec sleep 60"] for name in "ab"]
    with pytest.raises(CommandError, match="did not finish within 300 ms"):
        pipeline(argvs, timeout_s=0.3)
    assert all(ended(int((tmp_path / name).read_text())) for name in "ab")


def test_pipeline_ends_the_others_when_a_program_is_missing():
    began = time.monotonic()
    with pytest.raises(LackingError):
        pipeline([["yes"], ["no-such-program"]], timeout_s=60)
    assert time.monotonic() - began < 30


def test_pipeline_interrupted_ends_all(tmp_path):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pipeline([["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"], ["cat"]], timeout_s=60)
    assert ended(int((tmp_path / "pid").read_text()))


def test_secret_is_in_no_error_of_a_pipeline():
    with pytest.raises(CommandError) as caught:
        pipeline([["echo", SECRET], ["sh", "-c", "cat >&2; exit 1"]], timeout_s=5, secrets=(SECRET,))
    assert SECRET not in str(caught.value)
    with pytest.raises(CommandError) as caught:
        pipeline([["sh", "-c", f": {SECRET}; sleep 9"], ["cat"]], timeout_s=0.1, secrets=(SECRET,))
    assert SECRET not in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- running


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
    with (tmp_path / "log").open("wb") as log, pytest.raises(LackingError), running(["/no/such"], output=log):
        pass


def test_death_with_the_parent(tmp_path):
    # What `running` documents for callers: the server dies with us even on SIGKILL.
    log = tmp_path / "log"
    parent = f"""
import sys, time
from snapmgr.command import running
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
