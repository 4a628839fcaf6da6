"""The guest from outside: what reaches it, what comes back, and that nothing is left of it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import guest
from support.processes import children
from support.storage import processes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.needs("user-mode-linux"), pytest.mark.timeout(300)]

SAY_MUCH = """
import os, sys
print(sys.argv[1:])
print(repr(sys.stdin.read()), sys.stdout.isatty(), os.getcwd())
print({name: os.environ.get(name) for name in ("SNAPMGR_X", "HOME", "SECRET", "SNAPMGR_TEST_DEV")})
sys.stdout.flush()
sys.stdout.buffer.write(b"\\r\\x00\\xff\\n" + b"line\\n" * 100_000)
sys.stdout.flush()
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
ARGUMENTS = ["two words", "it's", '"', "", "$HOME", "-x", "ä\n*"]


def test_a_command_gets_its_arguments_and_environment_whole_and_its_output_and_status_come_back():
    env = {**os.environ, "SNAPMGR_X": "x 'y'", "SECRET": "s"}
    argv = guest.command_line("/usr/bin/python3", "-c", SAY_MUCH, *ARGUMENTS)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=env)
    assert done.returncode == 7, done
    first, second, third, rest = done.stdout.split(b"\n", 3)
    assert first.decode() == repr(ARGUMENTS)
    assert second.decode() == f"'' False {guest.LAUNCHER.parents[1]}"
    assert third.decode() == str(
        {"SNAPMGR_X": "x 'y'", "HOME": "/root", "SECRET": None, "SNAPMGR_TEST_DEV": "/dev/ubda"}
    )
    assert rest == b"\r\x00\xff\n" + b"line\n" * 100_000
    assert done.stderr == b"to stderr\n"


def test_two_boots_with_one_disk_and_one_folder_are_a_reboot_and_udev_is_there_if_asked_for(tmp_path):
    disk, keep = tmp_path / "disk of mine", tmp_path / "kept"
    keep.mkdir()
    make = "set -e; vgcreate -q vg0 $SNAPMGR_TEST_DEV; lvcreate -qy -L 12m -n a vg0; echo $LVM_SYSTEM_DIR"
    make += "; cat /proc/sys/kernel/random/boot_id >$SNAPMGR_GUEST_KEEP/first; touch /etc/mine"
    first = guest.boot("sh", "-c", make, disk=disk, keep=keep)
    assert (first.returncode, first.stdout.splitlines()[-1]) == (0, "/run/lvm-guest"), first
    look = "lvs --noheadings -o lv_name,lv_active vg0; pgrep -c systemd-udevd; echo $LVM_SYSTEM_DIR$DM_DISABLE_UDEV"
    look += "; readlink /dev/vg0/a; cat /proc/sys/kernel/random/boot_id; ls /etc/mine"
    second = guest.boot("sh", "-c", look, disk=disk, keep=keep, udev=True)
    assert second.returncode == 2, second
    volume, daemons, settings, link, boot_id = second.stdout.splitlines()
    assert (volume.split(), int(daemons) > 0, settings) == (["a", "active"], True, "")
    # Only udev's rules activate what has come, and make the link lead to the node itself.
    assert link == "../dm-0"
    assert boot_id != (keep / "first").read_text().strip()
    assert disk.stat().st_size == 8 << 30
    assert not Path("/etc/mine").exists()


@contextmanager
def started(
    command: str, limit_s: float = 60.0, *options: str, below_shell: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Yield a launcher whose guest runs a command; what is left of the launcher is killed."""
    launcher, *rest = guest.command_line("sh", "-c", f"cat /proc/cmdline; {command}", limit_s=limit_s)
    argv = [launcher, *options, *rest]
    # Not the shell's last command: it would take the shell's place.
    argv = ["/bin/sh", "-c", '"$@"; :', "sh", *argv] if below_shell else argv
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def its_work_folder(launcher: subprocess.Popen[str]) -> Path:
    """Return the work folder of a guest whose command runs."""
    assert launcher.stdout is not None
    words = launcher.stdout.readline().split()
    folder = next(Path(word.removeprefix("snapmgr_work=")) for word in words if word.startswith("snapmgr_work="))
    assert (folder / "disk").exists()
    assert processes_of(folder)
    return folder


def is_gone(folder: Path) -> bool:
    deadline = time.monotonic() + 60
    while (folder.exists() or processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not folder.exists() and not processes_of(folder)


def ended(launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return the exit code, and what has not been read of stdout and stderr."""
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    out, said = launcher.stdout.read(), launcher.stderr.read()
    return launcher.wait(timeout=60), out, said


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
    ids=lambda value: getattr(value, "name", None),
)
def test_nothing_is_left_of_a_guest_when_its_launcher_gets(number, code):
    with started("sleep 60 & setsid sleep 60 & wait") as launcher:
        folder = its_work_folder(launcher)
        launcher.send_signal(number)
        returned, _, said = ended(launcher)
    assert returned == code
    assert number is signal.SIGKILL or f"was ended by {number.name}" in said
    assert is_gone(folder)


def test_nothing_is_left_of_a_guest_when_its_caller_or_its_keeper_is_killed_or_nobody_reads():
    with started("sleep 60", below_shell=True) as caller:
        folder = its_work_folder(caller)
        caller.kill()
        ended(caller)
    assert is_gone(folder)

    with started("sleep 60") as launcher:
        folder = its_work_folder(launcher)
        # The process that would clear up.
        (keeper,) = children(launcher.pid)
        os.kill(keeper, signal.SIGKILL)
        code, _, said = ended(launcher)
    assert (code, "without a status" in said) == (99, True)
    assert is_gone(folder)

    with started("while :; do echo more; sleep 0.1; done") as launcher:
        folder = its_work_folder(launcher)
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.wait(timeout=60) == 128 + signal.SIGPIPE
    assert is_gone(folder)


def test_a_time_limit_ends_the_command_first_and_then_the_guest_and_silence_ends_it_too():
    # Time enough to boot on a busy machine.
    obedient = started("trap 'echo so far; exit 0' TERM; sleep 60 & wait", limit_s=24)
    stubborn = started("trap '' TERM; echo here; sleep 60; sleep 60", limit_s=20)
    silent = started("echo here; sleep 300", 200, "--silence=20")
    with obedient as one, stubborn as other, silent as third:
        folders = [its_work_folder(launcher) for launcher in (one, other, third)]
        code, out, said = ended(other)
        assert (code, out) == (124, "here\n"), said
        assert "did not end within 20 s and was killed" in said
        code, out, said = ended(one)
        assert (code, out) == (124, "so far\n"), said
        assert "was near its time limit of 24 s, so its command was ended" in said
        code, out, said = ended(third)
        assert (code, out) == (124, "here\n"), said
        assert "printed nothing for 20 s and was killed" in said
    assert all(is_gone(folder) for folder in folders)


def test_a_guest_without_a_status_is_a_failure_that_shows_its_console_and_one_that_cannot_start_says_why(tmp_path):
    done = guest.boot("sh", "-c", "echo said; kill -9 $$")
    assert (done.returncode, done.stdout) == (137, "said\n"), done
    done = guest.boot("sh", "-c", "echo c >/proc/sysrq-trigger")
    assert done.returncode == 99, done
    assert "ended without a status" in done.stderr
    assert "Kernel panic" in done.stderr

    (tmp_path / "bin").mkdir()
    for program in ("python3", "env"):
        (tmp_path / "bin" / program).symlink_to(f"/usr/bin/{program}")
    done = guest.boot("true", env={"PATH": str(tmp_path / "bin")})
    assert (done.returncode, "linux.uml is not installed" in done.stderr) == (7, True), done
    done = guest.boot("true", disk=tmp_path / "absent" / "disk")
    assert (done.returncode, "No such file" in done.stderr) == (7, True), done
    done = subprocess.run([guest.LAUNCHER], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 2
