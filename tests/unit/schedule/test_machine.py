"""Schedules as texts and as files: quoting, taking back on any failure, never a foreign file."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.catalog.manifest import Schedule
from snapmgr.catalog.store import Catalog
from snapmgr.config.model import Job
from snapmgr.contract.errors import CommandError, ConfigError, SnapmgrError
from snapmgr.contract.records import Completed
from snapmgr.schedule.command import own_command
from snapmgr.schedule.cron import cron_text, quote_command, shell_command
from snapmgr.schedule.machine import (
    Machine,
    install,
    installed_files,
    is_waiting,
    last_result,
    marker,
    plan_install,
    remove,
)
from snapmgr.schedule.systemd import quote_word, service_text
from snapmgr.system.command import CommandRunner
from support.calendars import cron_command, systemd_words
from support.sample import NOW

JOB = Job(source="directory", path="/srv", name="nightly")
NASTY = st.text(
    st.one_of(
        st.sampled_from(" %\\\"'$;`!&|<>*?#~{}()[]\t=:@+-é"), st.characters(codec="utf-8", exclude_characters="\0")
    ),
    min_size=1,
    max_size=30,
)
PRINTABLE = NASTY.filter(str.isprintable)


# -------------------------------------------------------------------------------------------------------------- texts


@given(st.lists(PRINTABLE, min_size=1, max_size=4))
def test_systemd_reads_the_words_that_were_meant(words):
    line = next(
        line
        for line in service_text("# m", "j", words, "mysql").splitlines()
        if line.startswith("ExecStart=") and line.isprintable()
    )
    assert systemd_words(line.removeprefix("ExecStart=")) == words
    assert " ".join(quote_word(word) for word in words) == line.removeprefix("ExecStart=:")


@given(st.lists(PRINTABLE, min_size=1, max_size=4))
def test_cron_and_its_shell_read_the_words_that_were_meant(words):
    try:
        line = quote_command(shell_command(words))
    except ConfigError:
        assert "\\" in "".join(words)
        return
    assert "\n" not in line
    assert shlex.split(cron_command(line)) == [*words, ">/dev/null"]
    assert cron_text("# m", "02:30", words).splitlines()[-1] == f"30 2 * * * root {line}"


@given(NASTY)
def test_a_path_that_no_schedule_can_hold_is_refused(name):
    path = Path("/etc") / name.replace("/", "_")
    if str(path).isprintable():
        assert own_command(path, "j")[-3:] == (os.path.abspath(path), "backup", "j")
    else:
        with pytest.raises(ConfigError, match="a schedule cannot contain it"):
            own_command(path, "j")


def test_paths_that_are_not_utf_8_are_refused():
    with pytest.raises(ConfigError, match="not UTF-8"):
        own_command(Path(os.fsdecode(b"/etc/\xff.toml")), "j")


def test_the_program_is_named_absolutely_with_a_script_or_without(tmp_path, monkeypatch):
    script, config = Path(sys.executable).with_name("snapmgr"), Path.cwd() / "snapmgr.toml"
    assert own_command(Path("snapmgr.toml"), "j") == (str(script), "--quiet", "--config", str(config), "backup", "j")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert own_command(Path("/c"), "j")[:4] == (str(tmp_path / "python3"), "-P", "-m", "snapmgr")


def test_cron_gets_no_command_that_it_would_cut():
    with pytest.raises(ConfigError, match="longer than"):
        quote_command("x" * 1000)


# ------------------------------------------------------------------------------------------------- files of a machine


class Recorder(CommandRunner):
    """Notes systemctl's calls, and fails the one that it is told to; everything else is run."""

    def __init__(self, *, fail="", returncode=0):
        self.calls = []
        self._fail = fail
        self._returncode = returncode

    def run(self, argv, **options):
        if argv[0] != "systemctl":
            return super().run(argv, **options)
        self.calls.append(" ".join(argv[1:]))
        if self._fail and self._fail in self.calls[-1]:
            raise CommandError(f"systemctl {self._fail} failed")
        said = "Result=success\nExecMainStatus=0\nExecMainExitTimestamp=Sat 2026-01-31 02:30:07 UTC\n"
        return Completed(
            argv=tuple(argv), returncode=self._returncode, stdout=said if argv[1] == "show" else "", stderr=""
        )


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "root/run/systemd/system").mkdir(parents=True)
    (tmp_path / "root/etc/cron.d").mkdir(parents=True)
    return Machine(root=tmp_path / "root", runner=Recorder())


@pytest.fixture
def state(tmp_path):
    return Catalog(tmp_path / "state")


def _plan(machine, kind="systemd", expression="02:30", config="/etc/snapmgr/snapmgr.toml", **fields):
    schedule = Schedule(job="nightly", kind=kind, expression=expression, installed_at=NOW, **fields)
    return plan_install(machine, JOB, schedule, Path(config))


def _files(machine):
    found = [path for path in machine.root.rglob("*snapmgr*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(machine.root)): path.read_text() for path in found}


def test_what_the_machine_has_is_taken(tmp_path):
    machine = Machine(root=tmp_path)
    assert machine.choose() is None
    (tmp_path / "etc/cron.d").mkdir(parents=True)
    assert machine.choose() is None
    (tmp_path / "usr/sbin").mkdir(parents=True)
    (tmp_path / "usr/sbin/cron").touch()
    assert machine.choose() == "cron"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert machine.choose() == "systemd"


@pytest.mark.parametrize("kind", ["systemd", "cron"])
def test_install_again_and_remove_twice(machine, state, kind):
    plan = _plan(machine, kind)
    old = os.umask(0o077)
    try:
        install(machine, state, plan)
    finally:
        os.umask(old)
    assert _files(machine) == {str(path.relative_to(machine.root)): text for path, text in plan.files.items()}
    for path in plan.files:
        # cron passes over what others may write, and systemd complains of what it may not read.
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert state.schedules() == ([plan.schedule], [])
    install(machine, state, _plan(machine, kind, "04:00"))
    assert "4 * * *" in "".join(_files(machine).values()) or "OnCalendar=04:00" in "".join(_files(machine).values())
    assert state.schedules()[0][0].expression == "04:00"
    assert sorted(remove(machine, state, "nightly")) == sorted(plan.files)
    assert (_files(machine), state.schedules()) == ({}, ([], []))
    assert remove(machine, state, "nightly") == []


def test_systemd_is_told(machine, state):
    install(machine, state, _plan(machine))
    calls = ["daemon-reload", "enable --quiet snapmgr-nightly.timer", "restart snapmgr-nightly.timer"]
    assert machine.runner.calls == calls
    assert is_waiting(machine, "nightly")
    assert last_result(machine, "nightly") == "success, exit code 0, ended Sat 2026-01-31 02:30:07 UTC"
    assert is_waiting(Machine(root=machine.root, runner=Recorder(returncode=3)), "nightly") is False
    machine.runner.calls.clear()
    remove(machine, state, "nightly")
    assert machine.runner.calls == ["disable --now --quiet snapmgr-nightly.timer", "daemon-reload"]


def test_one_kind_takes_the_place_of_the_other(machine, state):
    install(machine, state, _plan(machine, "cron"))
    install(machine, state, _plan(machine, "systemd"))
    assert [name.rpartition("/")[2] for name in sorted(_files(machine))] == [
        "snapmgr-nightly.service",
        "snapmgr-nightly.timer",
    ]
    install(machine, state, _plan(machine, "cron"))
    assert list(_files(machine)) == ["etc/cron.d/snapmgr-nightly"]


@pytest.mark.parametrize("name", ["systemd/system/snapmgr-nightly.timer", "cron.d/snapmgr-nightly"])
@pytest.mark.parametrize("content", ["", "# by somebody\n", marker("other") + "\n", marker("nightly") + " not\n", None])
def test_a_foreign_file_is_neither_replaced_nor_removed(machine, state, name, content):
    path = machine.root / "etc" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.symlink_to("/dev/null")  # systemctl mask
    else:
        path.write_text(content)
    for kind in ("systemd", "cron"):
        with pytest.raises(SnapmgrError, match="was not written by snapmgr"):
            install(machine, state, _plan(machine, kind))
    with pytest.raises(SnapmgrError, match="was not written by snapmgr"):
        remove(machine, state, "nightly")
    assert installed_files(machine, "nightly") == []
    assert path.is_symlink() if content is None else path.read_text() == content
    assert machine.runner.calls == []
    assert state.schedules() == ([], [])


def test_a_symlink_is_foreign_wherever_it_leads(machine, state, tmp_path):
    install(machine, state, _plan(machine, "cron"))
    path = machine.root / "etc/cron.d/snapmgr-nightly"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapmgrError, match="was not written by snapmgr"):
        remove(machine, state, "nightly")
    assert path.is_symlink()


@pytest.mark.parametrize("step", ["daemon-reload", "enable", "restart"])
@pytest.mark.parametrize("before", [False, True])
def test_a_failure_leaves_everything_as_it_was(machine, state, step, before):
    if before:
        install(machine, state, _plan(machine, expression="04:00"))
    files, schedules = _files(machine), state.schedules()
    broken = Machine(root=machine.root, runner=Recorder(fail=step))
    link = machine.units / "timers.target.wants/snapmgr-nightly.timer"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to("../snapmgr-nightly.timer")
    with pytest.raises(SnapmgrError, match=f"systemctl {step} failed"):
        install(broken, state, _plan(machine))
    assert _files(machine) == files
    assert state.schedules() == schedules
    # systemd sees the files as they are now, and waits for nothing that is not there.
    assert broken.runner.calls[-1] == "daemon-reload"
    assert ("stop snapmgr-nightly.timer" in broken.runner.calls) != before
    assert link.is_symlink() == before


def test_a_full_disk_leaves_nothing(machine, state, monkeypatch):
    def full(_fd):
        raise OSError(28, "No space left on device")

    plan = _plan(machine, "cron")
    state.make()
    real = os.fsync
    calls = []

    def fails_in_etc(fd):
        if "cron.d" in os.readlink(f"/proc/self/fd/{fd}"):
            calls.append(fd)
            full(fd)
        real(fd)

    monkeypatch.setattr(os, "fsync", fails_in_etc)
    with pytest.raises(SnapmgrError, match="No space left"):
        install(machine, state, plan)
    assert calls
    assert list((machine.root / "etc/cron.d").iterdir()) == []
    assert state.schedules() == ([], [])


def test_a_killed_install_leaves_a_schedule_that_status_waits_for(machine, state, tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "import snapmgr.schedule.machine as m; from snapmgr.catalog.store import Catalog\n"
        "from snapmgr.config.model import Job; from snapmgr.catalog.manifest import Schedule\n"
        "from support.sample import NOW\n"
        "m._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "root = Path(sys.argv[1]); machine = m.Machine(root=root / 'root')\n"
        "s = Schedule(job='nightly', kind='cron', expression='02:30', installed_at=NOW)\n"
        "job = Job(source='directory', path='/srv', name='nightly')\n"
        "m.install(machine, Catalog(root / 'state'), m.plan_install(machine, job, s, Path('/c')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path, Path(__file__).parents[2]], check=False)
    assert done.returncode == -9
    assert [schedule.job for schedule in state.schedules()[0]] == ["nightly"]
    # The next one puts it right, or takes it away.
    install(machine, state, _plan(machine, "cron"))
    assert len(remove(machine, state, "nightly")) == 1
