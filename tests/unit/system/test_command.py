"""Tries to break the command runner, with real programs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.errors import CommandError, MissingRequirementError
from snapmgr.system import command
from snapmgr.system.command import CommandRunner, clean_environment, find_program, redact
from support.processes import children, ended, wait_until

pytestmark = pytest.mark.usefixtures("no_child_is_left")
SECRET = "s3cr3t-pässword"


@pytest.fixture
def runner():
    return CommandRunner()


# ---------------------------------------------------------------------------------------------------------------- run


def test_returns_what_was_printed(runner):
    done = runner.run(["sh", "-c", "echo out; echo err >&2"])
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 0)
    assert done.argv == ("sh", "-c", "echo out; echo err >&2")


def test_arguments_are_passed_as_they_are(runner):
    nasty = ["a b", "$(id)", "`id`", "'; rm x", "", "ä\n", "-n"]
    assert runner.run(["printf", "<%s>", *nasty]).stdout == "".join(f"<{text}>" for text in nasty)


def test_stdin_is_closed(runner):
    assert runner.run(["cat"], timeout_s=5).stdout == ""


def test_large_output_on_both_streams_does_not_block(runner):
    script = "head -c 3000000 /dev/zero | tr '\\0' e >&2; head -c 3000000 /dev/zero"
    done = runner.run(["sh", "-c", script], timeout_s=20)
    assert (len(done.stdout), len(done.stderr)) == (3_000_000, 3_000_000)


def test_bytes_that_are_no_utf8_are_replaced(runner):
    assert runner.run(["printf", r"a\377b"]).stdout == "a\N{REPLACEMENT CHARACTER}b"


def test_environment_is_clean(runner, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD_X", "1")
    monkeypatch.setenv("MYSQL_PWD", SECRET)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HOME", "/somewhere")
    lines = runner.run(["env"], env={"EXTRA": "1"}).stdout.splitlines()
    assert "LC_ALL=C.UTF-8" in lines
    assert "HOME=/somewhere" in lines
    assert "EXTRA=1" in lines
    names = {line.partition("=")[0] for line in lines}
    assert names <= {"PATH", "LC_ALL", "HOME", "TMPDIR", "LVM_SYSTEM_DIR", "DM_DISABLE_UDEV", "EXTRA"}
    assert SECRET not in str(lines)
    assert clean_environment()["PATH"].startswith("/usr/")


def test_runs_in_the_root_folder_without_our_descriptors(runner, tmp_path):
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        done = runner.run(["sh", "-c", "pwd; ls -l /proc/self/fd"])
    assert done.stdout.startswith("/\n")
    assert str(tmp_path) not in done.stdout


def test_program_has_no_controlling_terminal_of_ours(runner):
    # Own session: Ctrl-C at the terminal goes to the foreground group only.
    assert int(runner.run(["sh", "-c", "cut -d' ' -f6 /proc/$$/stat"]).stdout) != os.getsid(0)


def test_other_exit_code_is_an_error_that_says_what_the_program_said(runner):
    with pytest.raises(CommandError, match=r"sh -c .* failed \(exit code 3\): no space") as caught:
        runner.run(["sh", "-c", "echo no space >&2; exit 3"])
    assert caught.value.exit_code == 1


def test_error_falls_back_to_stdout(runner):
    with pytest.raises(CommandError, match="exit code 1\\): said on stdout"):
        runner.run(["sh", "-c", "echo said on stdout; exit 1"])


def test_declared_exit_code_is_no_error(runner):
    assert runner.run(["sh", "-c", "exit 5"], ok=(0, 5)).returncode == 5


def test_zero_is_an_error_where_only_another_code_is_declared(runner):
    with pytest.raises(CommandError, match="exit code 0"):
        runner.run(["true"], ok=(1,))


def test_death_by_signal_is_named(runner):
    with pytest.raises(CommandError, match="signal 9"):
        runner.run(["sh", "-c", "kill -9 $$"])


def test_stderr_in_the_error_is_bounded_and_keeps_the_end(runner):
    with pytest.raises(CommandError) as caught:
        runner.run(["sh", "-c", "head -c 100000 /dev/zero | tr '\\0' x >&2; echo THE END >&2; exit 1"])
    assert len(str(caught.value)) < 2500
    assert str(caught.value).endswith("THE END")


def test_missing_program_names_the_package(runner, monkeypatch):
    with pytest.raises(MissingRequirementError) as caught:
        runner.run(["no-such-program-here"])
    assert caught.value.exit_code == 7
    assert "no-such-program-here" in caught.value.message
    # Only what is known to be a package is said to be one.
    assert "apt-get" not in str(caught.value.hint)
    monkeypatch.setattr("snapmgr.system.command._which", lambda _name: None)
    with pytest.raises(MissingRequirementError) as known:
        runner.run(["mariadbd"])
    assert known.value.hint == "apt-get install mariadb-server-core"


def test_missing_program_by_path_is_lacking_too(runner):
    with pytest.raises(MissingRequirementError, match="/opt/none/mysqld does not exist"):
        runner.run(["/opt/none/mysqld"])


def test_what_cannot_be_started_is_a_command_error(runner, tmp_path):
    (tmp_path / "plain").write_text("no program")
    with pytest.raises(CommandError, match="cannot start .*Permission denied"):
        runner.run([str(tmp_path / "plain")])
    with pytest.raises(CommandError, match="cannot start .*too long"):
        runner.run(["true", "x" * 10_000_000])
    with pytest.raises(CommandError, match="cannot start .*null byte"):
        runner.run(["true", "a\0b"])


def test_program_comes_from_the_fixed_path_only(tmp_path, monkeypatch):
    fake = tmp_path / "btrfs-fake"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingRequirementError):
        find_program("btrfs-fake")
    assert find_program("sh").endswith("/sh")


# ----------------------------------------------------------------------------------------------------------- time limit


def test_time_limit_ends_the_whole_group(runner, tmp_path):
    script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    began = time.monotonic()
    with pytest.raises(CommandError, match="did not finish within 300 ms"):
        runner.run(["sh", "-c", script], timeout_s=0.3)
    assert time.monotonic() - began < 4
    assert ended(int((tmp_path / "pid").read_text()))


def test_time_limit_kills_what_ignores_sigterm(runner, monkeypatch, tmp_path):
    monkeypatch.setattr(command.end_process, "__kwdefaults__", {"grace_s": 0.3})
    loop = "while :; do sleep 0.05; done"
    script = f"trap '' TERM; (trap '' TERM; sh -c 'echo $PPID' > {tmp_path}/pid; {loop}) & {loop}"
    with pytest.raises(CommandError, match="did not finish"):
        runner.run(["sh", "-c", script], timeout_s=0.3)
    wait_until(lambda: ended(int((tmp_path / "pid").read_text())))


def test_group_member_that_survives_its_leader_is_killed(runner, monkeypatch, tmp_path):
    # The leader dies of SIGTERM at once, its child ignores it.
    monkeypatch.setattr(command.end_process, "__kwdefaults__", {"grace_s": 0.3})
    script = f"(trap '' TERM; sh -c 'echo $PPID' > {tmp_path}/pid; while :; do sleep 0.05; done) & sleep 60"
    with pytest.raises(CommandError, match="did not finish"):
        runner.run(["sh", "-c", script], timeout_s=0.4)
    wait_until(lambda: ended(int((tmp_path / "pid").read_text())))


def test_stopped_program_is_ended(runner):
    began = time.monotonic()
    with pytest.raises(CommandError, match="did not finish"):
        runner.run(["sh", "-c", "kill -STOP $$; sleep 60"], timeout_s=0.3)
    assert time.monotonic() - began < 4


def test_daemon_that_keeps_stdout_open_does_not_hold_us_up(runner):
    began = time.monotonic()
    done = runner.run(["sh", "-c", "setsid sleep 3 & echo done"], timeout_s=10)
    assert done.stdout == "done\n"
    assert time.monotonic() - began < 2


def test_end_is_noticed_at_once(runner):
    runner.run(["true"])
    best = min(_seconds(lambda: runner.run(["sleep", "0.1"])) for _ in range(3))
    assert best < 0.14  # Popen.wait with a limit polls with pauses of up to 50 ms


def _seconds(action):
    began = time.monotonic()
    action()
    return time.monotonic() - began


@pytest.mark.leaves_child
def test_abandoned_program_runs_on_and_may_go_on_talking(runner, tmp_path):
    script = f"sleep 0.5; for i in 1 2 3; do echo talk; echo talk >&2; done && echo finished > {tmp_path}/end"
    with pytest.raises(CommandError, match="was left running") as caught:
        runner.run(["sh", "-c", script], timeout_s=0.1, abandon=True)
    assert "process" in str(caught.value.hint)
    wait_until(lambda: (tmp_path / "end").exists())
    # …and the next command reaps it.
    wait_until(lambda: runner.run(["true"]) and not command._abandoned)
    assert not children()


@pytest.mark.leaves_child
def test_interruption_leaves_an_abandonable_program_alone(runner, tmp_path):
    threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        runner.run(["sh", "-c", f"sleep 0.6; echo finished > {tmp_path}/end"], abandon=True)
    wait_until(lambda: (tmp_path / "end").exists())
    wait_until(lambda: runner.run(["true"]) and not command._abandoned)


@pytest.mark.parametrize("limit", [None, 30.0])
def test_interruption_ends_and_reaps_the_program(runner, limit, tmp_path):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner.run(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"], timeout_s=limit)
    assert time.monotonic() - began < 3
    assert ended(int((tmp_path / "pid").read_text()))


def test_second_interruption_still_kills(runner, tmp_path):
    script = f"trap '' TERM INT; echo $$ > {tmp_path}/pid; while :; do sleep 0.05; done"
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        runner.run(["sh", "-c", script])
    assert ended(int((tmp_path / "pid").read_text()))


def test_no_descriptor_is_left_open(runner):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    runner.run(["true"])
    before = descriptors()
    for _ in range(5):
        runner.run(["true"])
        with pytest.raises(CommandError):
            runner.run(["false"])
        with pytest.raises(CommandError):
            runner.run(["sleep", "9"], timeout_s=0.01)
        with pytest.raises(MissingRequirementError):
            runner.run(["no-such-program"])
    assert descriptors() == before


# -------------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("argv", "limit"),
    [
        (["sh", "-c", f"echo bad {SECRET} >&2; exit 1"], 5.0),
        (["sh", "-c", f"echo bad {SECRET}; exit 1"], 5.0),
        (["sh", "-c", f": {SECRET}; sleep 9"], 0.1),
        (["/dev/null", SECRET], 5.0),
        # Split at the border of what is shown, half a secret would survive if the text were cut first.
        (["sh", "-c", f"printf '%s%01990d' {SECRET} 0 >&2; exit 1"], 5.0),
    ],
)
def test_secret_is_in_no_error(runner, argv, limit):
    with pytest.raises(CommandError) as caught:
        runner.run(argv, secrets=(SECRET,), timeout_s=limit)
    error = caught.value
    said = f"{error!s} {error!r} {error.hint} {error.__cause__!r} {error.__context__!r}"
    assert "pässword" not in said
    assert "***" in str(error) or "0000" in str(error)


def test_output_that_was_asked_for_is_not_redacted(runner):
    # A short secret would else damage what a caller parses.
    assert runner.run(["echo", "1024"], secrets=("1",)).stdout == "1024\n"


@given(st.text(), st.lists(st.text(alphabet="abc*", max_size=4)))
def test_redaction_leaves_no_secret(text, secrets):
    shown = redact(text, tuple(secrets))
    for secret in secrets:
        # What is left may only be the mask itself, or have arisen across one.
        assert not secret or secret not in shown.replace("***", "\0") or "*" in secret


def test_longer_secret_is_replaced_first():
    assert redact("abcdef", ("abc", "abcdef", "")) == "***"


# ----------------------------------------------------------------------------------------------------------------- held


def test_held_program_does_nothing_until_it_is_told_and_then_says_all(runner, tmp_path):
    with runner.hold(["sh", "-c", f"cat; touch {tmp_path}/done; echo said; echo 'two words' >&2"]) as held:
        time.sleep(0.2)
        assert not (tmp_path / "done").exists()
        done = held.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "two words\n")


def test_held_program_that_is_never_told_ends_with_nothing_done(runner, tmp_path):
    with runner.hold(["touch", f"{tmp_path}/done"]):
        pass
    assert not (tmp_path / "done").exists()


def test_held_program_ends_when_whoever_holds_it_back_is_killed(runner, tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        held = runner.hold(["touch", f"{tmp_path}/done"])
        os.write(writer, str(held._process.pid).encode())
        signal.pause()
    pid = int(os.read(reader, 20))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: ended(pid))
    assert not (tmp_path / "done").exists()
    os.close(reader)
    os.close(writer)


def test_held_program_that_fails_or_is_missing_is_an_error_with_what_it_said(runner):
    with runner.hold(["sh", "-c", "echo trouble >&2; exit 5"]) as held, pytest.raises(CommandError) as failure:
        held.run()
    assert "exit code 5): trouble" in failure.value.message
    with pytest.raises(MissingRequirementError, match="no-such-program is not installed"):
        runner.hold(["no-such-program"])
