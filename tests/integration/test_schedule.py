"""Schedules against the programs that obey them: systemd's own parser, a shell in cron's environment, real backups."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapmgr.catalog.manifest import Schedule
from snapmgr.catalog.store import Catalog
from snapmgr.config.load import load_config
from snapmgr.contract.errors import SnapmgrError
from snapmgr.schedule.machine import Machine, check_command, install, plan_install, remove
from snapmgr.schedule.systemd import CAPABILITIES, PATH, quote_word
from snapmgr.schedule.times import next_times, read_expression
from support.calendars import cron_command, expressions, systemd_words
from support.sample import NOW
from support.storage import work_folder

CONFIG = """\
state_dir = "{folder}/state"
scratch_dir = "{folder}/scratch"
[job.files]
source = "directory"
path = "{folder}/source"
"""


@pytest.fixture
def config(tmp_path):
    """A configuration at a path with all that shells, systemd and cron find special."""
    folder = tmp_path / 'it\'s 100% %h $HOME & "so" on'
    folder.mkdir()
    (tmp_path / "source").mkdir()
    path = folder / "snap mgr.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def _plan(machine, config, kind, job="files", expression="Mon..Fri 02:30", **fields):
    schedule = Schedule(job=job, kind=kind, expression=expression, installed_at=NOW, **fields)
    return plan_install(machine, load_config(config).job(job), schedule, config)


# ------------------------------------------------------------------------------------------------------------ systemd


def _analyze(*arguments, zone="UTC"):
    return subprocess.run(
        ["systemd-analyze", *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={"PATH": PATH, "TZ": zone, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0"},
    )


def _systemd_times(expression, after, zone, count):
    base = f"@{after.timestamp():.0f}"
    done = _analyze("calendar", f"--base-time={base}", f"--iterations={count}", expression, zone=zone)
    assert done.returncode == 0, f"{expression}: {done.stderr}"
    # In a zone other than UTC each time is given twice; "(in UTC)" is the clear one.
    lines = [line.strip() for line in done.stdout.splitlines()]
    wanted = "(in UTC): " if zone != "UTC" else ": "
    found = [
        line.split(wanted, 1)[1]
        for line in lines
        if line.startswith(("(in UTC)",) if zone != "UTC" else ("Next elapse", "Iter. #"))
    ]
    return [
        datetime.strptime(text, "%a %Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC) for text in found if text != "never"
    ]


@pytest.mark.needs("systemd-analyze")
@settings(max_examples=60)
@given(
    expressions(),
    st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
def test_our_times_are_systemds(expression, after):
    after = after.replace(microsecond=0)
    assert next_times(read_expression(expression), after, UTC, 3) == _systemd_times(expression, after, "UTC", 3)


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"])
@pytest.mark.parametrize("expression", ["02:30", "Sun 02:15", "*-*-29 01:45", "12:00 Asia/Tokyo"])
def test_our_times_are_systemds_when_clocks_change(zone, expression):
    after = datetime(2026, 3, 20, tzinfo=UTC)
    assert next_times(expression, after, ZoneInfo(zone), 40) == _systemd_times(expression, after, zone, 40)
    after = datetime(2026, 10, 1, tzinfo=UTC)
    assert next_times(expression, after, ZoneInfo(zone), 40) == _systemd_times(expression, after, zone, 40)


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("source", ["mysql", "directory"])
@pytest.mark.parametrize("delay_s", [0.0, 900.0])
def test_systemd_has_no_complaint(config, tmp_path, source, delay_s):
    if source == "mysql":
        config.write_text('[job.files]\nsource = "mysql"\nsocket = "/run/x.sock"\n')
    machine, catalog = Machine(root=tmp_path / "root"), Catalog(tmp_path / "state")
    plan = _plan(machine, config, "systemd", delay_s=delay_s)
    install(machine, catalog, plan)
    done = _analyze("verify", "--man=no", *map(str, plan.files))
    assert [line for line in done.stderr.splitlines() if "snapmgr-" in line] == []
    # Switched on for the next boot, by systemctl itself.
    assert os.readlink(machine.units / "timers.target.wants/snapmgr-files.timer").endswith("/snapmgr-files.timer")
    remove(machine, catalog, "files")
    assert [path for path in (tmp_path / "root").rglob("*") if not path.is_dir()] == []


@pytest.mark.needs("systemd-analyze")
def test_what_systemd_complains_of_is_taken_back(config, tmp_path, monkeypatch):
    machine, catalog = Machine(root=tmp_path / "root"), Catalog(tmp_path / "state")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone/python"))
    with pytest.raises(SnapmgrError, match="gone/python is not executable"):
        install(machine, catalog, _plan(machine, config, "systemd"))
    assert [path for path in (tmp_path / "root").rglob("*") if not path.is_dir()] == []
    assert catalog.schedules() == ([], [])


@pytest.mark.needs("systemd-analyze")
def test_systemd_reads_odd_program_names_as_they_were_meant(tmp_path):
    # Its parser says which program it has looked for in vain: the quoting, seen from the other side.
    names = ["a b", "100%", "%h %%n", "$HOME ${HOME}", "semi;colon ;", "é ü", "@x", "#y", ":", "-"]
    # These it refuses in a program's name, however they are quoted; in its arguments they are no matter.
    refused = ["it's", 'so "called"', "back\\slash \\x41"]
    for number, name in enumerate(names + refused):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        unit = tmp_path / f"snapmgr-{number}.service"
        unit.write_text(f"[Service]\nType=oneshot\nExecStart=:{quote_word(str(program))} {quote_word('x')}\n")
        complaint = "contains special characters" if name in refused else "is not executable"
        assert complaint in _complaints(unit), name
        program.symlink_to("/bin/true")
        assert (_complaints(unit) == "") == (name not in refused), name


def _complaints(unit):
    said = _analyze("verify", "--man=no", str(unit)).stderr
    return "\n".join(line for line in said.splitlines() if unit.name in line)


# --------------------------------------------------------------------------------------------- an empty environment


@pytest.mark.parametrize("kind", ["systemd", "cron"])
def test_the_command_line_works_in_an_empty_environment(config, tmp_path, kind):
    machine = Machine(root=tmp_path / "root")
    plan = _plan(machine, config, kind)
    # A directory on whatever file system: no backend may fit, and then the dry run says so.
    config.write_text(config.read_text() + f'backend = "reflink"\n[backend.reflink]\nstore = "{tmp_path}/store"\n')
    with pytest.raises(SnapmgrError) as caught:
        check_command(machine, plan)
    assert "reflink" in caught.value.message
    assert "No such file" not in caught.value.message


@pytest.mark.parametrize("kind", ["systemd", "cron"])
def test_what_would_not_work_at_night_is_found_now(config, tmp_path, kind, monkeypatch):
    machine = Machine(root=tmp_path / "root")
    plan = _plan(machine, config, kind)
    config.rename(tmp_path / "moved.toml")
    with pytest.raises(SnapmgrError, match=r"does not work in an empty environment.*does not exist"):
        check_command(machine, plan)
    # An interpreter that finds our modules only because of what stands in this shell's environment.
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    plan = _plan(machine, tmp_path / "moved.toml", kind)
    assert plan.command[:4] == ("/usr/bin/python3", "-P", "-m", "snapmgr")
    with pytest.raises(SnapmgrError, match="No module named"):
        check_command(machine, plan)


# ------------------------------------------------------------------------------------------------------- real backups


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")
def test_what_cron_would_run_takes_a_verified_snapshot(scene):
    scene.configure('after_backup = ["verify"]')
    odd = scene.folder / "100% odd"
    odd.mkdir(exist_ok=True)
    config = odd / "snapmgr.toml"
    config.write_bytes(scene.config_file.read_bytes())
    machine, catalog = Machine(root=scene.folder / "root"), Catalog(scene.state)
    plan = _plan(machine, config, "cron", job="demo")
    check_command(machine, plan)
    install(machine, catalog, plan)
    lines = (machine.crontabs / "snapmgr-demo").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if "=" in line.partition(" ")[0] and not line.startswith("#"))
    minute, hour, _, _, days, user, command = lines[-1].split(" ", 6)
    assert (minute, hour, days, user) == ("30", "2", "1-5", "root")
    # As cron does: its own environment and the file's, the home folder, and the sixth field to SHELL -c.
    done = subprocess.run(
        [variables["SHELL"], "-c", cron_command(command)],
        cwd="/root",
        env={"HOME": "/root", "LOGNAME": "root", "SHELL": variables["SHELL"], "PATH": variables["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    # Nothing to mail.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (entry,) = scene.entries()
    assert entry.verified
    status = scene.json("status")["jobs"][0]
    assert status["ok"], status
    # While a run is active another one ends with exit code 3, and says so: that is mailed.
    with catalog.job_lock("demo"):
        done = subprocess.run(["sh", "-c", cron_command(command)], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "another run of job demo is active" in done.stderr


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")
@pytest.mark.parametrize("without", [None, "CAP_SYS_PTRACE"])
def test_what_systemd_would_run_needs_no_more_capabilities_than_the_unit_leaves(scene, without):
    scene.configure('after_backup = ["verify", "prune"]\nretention.keep-last = 1')
    machine = Machine(root=scene.folder / "root")
    text = _plan(machine, scene.config_file, "systemd", job="demo").files[machine.units / "snapmgr-demo.service"]
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    kept = [name.removeprefix("CAP_").lower() for name in CAPABILITIES if name != without]
    # Once more, so that something is pruned.
    for _ in range(1 if without else 2):
        done = subprocess.run(
            ["setpriv", "--no-new-privs", f"--bounding-set=-all,+{',+'.join(kept)}", "--inh-caps=-all", "--",
             "env", "-i", f"PATH={PATH}", *systemd_words(line.removeprefix("ExecStart="))],
            cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == (without is None), done.stderr
    if without is None:
        (entry,) = scene.entries()
        assert entry.verified


@pytest.mark.needs("root")
def test_status_needs_no_root_where_the_state_directory_may_be_read():
    with work_folder() as folder:
        _try_status_unprivileged(folder)


def _try_status_unprivileged(folder):
    config = folder / "snapmgr.toml"
    config.write_text(CONFIG.format(folder=folder))
    catalog = Catalog(folder / "state")
    catalog.make()
    at = datetime.now(UTC) - timedelta(hours=30)
    catalog.write_schedule(Schedule(job="files", kind="cron", expression="daily", installed_at=at))

    def as_nobody():
        return subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--",
             sys.executable, "-m", "snapmgr", "-c", config, "status"],
            capture_output=True, text=True, check=False, cwd="/",
        )  # fmt: skip

    done = as_nobody()
    assert done.returncode == 7, done.stdout + done.stderr
    assert "no permission to read" in done.stderr
    for path in (folder / "state", *(folder / "state").rglob("*")):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    done = as_nobody()
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("PROBLEM: files: there is no snapshot, and one was due at ")
