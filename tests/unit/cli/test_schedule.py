"""``snapmgr schedule`` and ``snapmgr status``, called as people and monitoring call them."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from snapmgr.catalog.manifest import Schedule, Verification
from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import StorageError
from snapmgr.schedule import machine as machine_module
from support.sample import manifest

DOCS = Path(__file__).parents[3] / "docs"
HOUR = timedelta(hours=1)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine with cron and without systemd, for commands that run in this process."""
    root = tmp_path / "root"
    (root / "etc/cron.d").mkdir(parents=True)
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/cron").touch()
    real = machine_module.Machine
    monkeypatch.setattr(machine_module, "Machine", lambda **options: real(root=root, **options))
    return root


def _install(run, *more, yes=True):
    given = ("schedule", "install", "nightly", "--on-calendar", "Mon..Fri 02:30", "--unchecked", *more)
    return run(*given, *(["--yes"] if yes else []))


def _json(answer):
    code, out, _ = answer
    document = json.loads(out)
    assert document["exit_code"] == code
    return document


# ----------------------------------------------------------------------------------------------------------- schedule


def test_install_shows_what_it_writes_and_writes_what_it_shows(run, root, config):
    code, out, err = _install(run)
    assert code == 0, err
    path = root / "etc/cron.d/snapmgr-nightly"
    assert out == f"# {path}\n{path.read_text()}\n"
    assert f"--config {config} backup nightly" in out
    shown = run("schedule", "show")
    assert shown[0] == 0
    assert shown[1].startswith(f"nightly: Mon..Fri 02:30 (cron)\n  file  {path}\n  next  2")
    assert re.search(r"next  \S+T\d\d:\d\d:00Z$", shown[1], re.MULTILINE)
    assert run("schedule", "remove", "nightly")[1] == f"removed {path}\n"
    assert not path.exists()
    assert run("schedule", "remove", "nightly") == (0, "", "job nightly has no schedule here\n")
    assert run("schedule", "show")[2] == "no job has a schedule here\n"


def test_a_dry_run_touches_nothing(run, root, tmp_path):
    assert _install(run, "--dry-run", yes=False)[0] == 0
    assert not (tmp_path / "state").exists()
    assert list((root / "etc/cron.d").iterdir()) == []
    _install(run)
    assert run("schedule", "remove", "nightly", "-n")[1].startswith("would remove ")
    assert (root / "etc/cron.d/snapmgr-nightly").exists()


@pytest.mark.usefixtures("root")
def test_systemd_units_can_be_had_where_it_does_not_run(run):
    assert _install(run, "--systemd", "-n")[1].count("[Unit]") == 2
    assert _install(run, "--systemd", "--random-delay", "15m", "-n")[1].count("RandomizedDelaySec=900s") == 1


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["install", "nightly"], "Missing option '--on-calendar'"),
        (["install", "nightly", "--on-calendar", "25:00", "--yes"], "is not a calendar expression"),
        (["install", "nightly", "--on-calendar", "2020-01-01", "--yes"], "is always in the past"),
        (["install", "nightly", "--on-calendar", "02:30 UTC", "--yes"], "cron cannot express"),
        (["install", "nightly", "--on-calendar", "02:30", "--random-delay", "5m"], "no random delay"),
        (["install", "nihgtly", "--on-calendar", "02:30"], "did you mean nightly?"),
        (["remove", "../cron.d/x"], "there is no job"),
        (["show", "other"], "there is no job"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(run, arguments, says):
    code, _, err = run("schedule", *arguments)
    assert code == 2
    assert says in err


def test_without_a_terminal_somebody_has_to_say_yes(run, root, monkeypatch):
    with open(os.devnull) as null:
        monkeypatch.setattr(sys, "stdin", null)
        code, out, err = _install(run, yes=False)
    assert code == 2
    assert "30 2 * * 1-5 root" in out
    assert "--yes" in err
    assert list((root / "etc/cron.d").iterdir()) == []


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_at_a_terminal_it_asks(config, tmp_path, answer, code):
    (tmp_path / "root/etc/cron.d").mkdir(parents=True)
    script = (
        "import sys; from pathlib import Path; import snapmgr.schedule.machine as m; real = m.Machine\n"
        f"m.Machine = lambda **o: real(root=Path({str(tmp_path / 'root')!r}), **o)\n"
        "from snapmgr.cli.main import main\n"
        f"sys.exit(main(['-c', {str(config)!r}, 'schedule', 'install', 'nightly', '--on-calendar', '02:30', '--cron',"
        " '--unchecked']))"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    err = process.communicate(timeout=20)[1]
    os.close(ours)
    assert "Write " in err
    assert process.returncode == code
    assert (tmp_path / "root/etc/cron.d/snapmgr-nightly").exists() == (code == 0)


def test_a_machine_with_neither_is_told_what_would_have_been_written(run, root):
    (root / "usr/sbin/cron").unlink()
    code, out, err = _install(run)
    assert code == 7
    assert "ExecStart=" in out
    assert "systemd does not run, and there is no cron" in err
    assert re.search("set max_age in the job: .* --quiet --config .* backup nightly$", err, re.MULTILINE)
    document = _json(_install(run, "--json"))
    assert document["error"]["exit_code"] == 7
    assert len(document["files"]) == 2
    assert not list(root.rglob("snapmgr*"))


def test_show_finds_what_somebody_has_removed(run, root):
    _install(run)
    (root / "etc/cron.d/snapmgr-nightly").unlink()
    code, _, err = run("schedule", "show")
    assert code == 1
    assert "snapmgr-nightly is missing" in err
    assert _json(run("schedule", "show", "--json"))["schedules"][0]["missing_files"]


@pytest.mark.parametrize("kind", ["systemd", "cron"])
def test_installed_where_nothing_reads_it_is_said(run, root, kind):
    (root / "usr/sbin/cron").unlink()
    code, _, err = _install(run, f"--{kind}")
    assert code == 0
    assert f"snapmgr: warning: {kind} does not run here: the job does not start until it does" in err
    (root / "usr/sbin/cron").touch()
    assert "warning" not in _install(run)[2]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("kind", ["systemd", "cron"])
def test_show_finds_files_that_a_lost_state_directory_no_longer_knows(run, tmp_path, kind):
    _install(run, f"--{kind}")
    shutil.rmtree(tmp_path / "state")
    for named in ([], ["nightly"]):
        code, _, err = run("schedule", "show", *named)
        assert code == 1
        assert err.count("exists, but the state directory does not know it") == 1
    _install(run, f"--{kind}")
    assert run("schedule", "show")[0] == 0


def test_show_finds_a_timer_that_somebody_has_stopped(run, root, monkeypatch):
    assert _install(run, "--systemd")[0] == 0
    (root / "run/systemd/system").mkdir(parents=True)
    for waiting, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(machine_module, "is_waiting", lambda *_, waiting=waiting: waiting)
        monkeypatch.setattr(machine_module, "last_result", lambda *_: "success, exit code 0, ended Sat")
        assert run("schedule", "show")[0] == code
    assert "its timer is stopped" in run("schedule", "show")[2]
    assert "  last  success" in run("schedule", "show")[1]


def test_a_schedule_of_a_job_that_is_gone_is_found_and_removed(run, root, config):
    _install(run)
    config.write_text(config.read_text().replace("job.nightly", "job.daily"))
    code, out, _ = run("status")
    assert code == 1
    assert "nightly: is scheduled, but no longer configured" in out
    assert _json(run("status", "--json"))["scheduled_but_not_configured"] == ["nightly"]
    assert run("schedule", "remove", "nightly")[0] == 0
    assert list((root / "etc/cron.d").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- status


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Store a snapshot that is so old, verified or not, and when the job was scheduled; its storage runs not full."""
    monkeypatch.setattr("snapmgr.capacity.read.sample_pool", lambda _ctx, _pool: None)

    def ran(age, *, verified="passed", scheduled="daily"):
        catalog = Catalog(tmp_path / "state")
        catalog.make()
        at = datetime.now(UTC) - age
        one = manifest(0, created_at=at, taken_at=at)
        catalog.write(one)
        if verified:
            catalog.write_verification(one.id, Verification(at=at, result=verified, duration_s=1.0))
        if scheduled:
            catalog.write_schedule(Schedule(job="nightly", kind="cron", expression=scheduled, installed_at=at - HOUR))
        return one

    return ran


def test_all_is_well(run, ran):
    ran(HOUR / 100, scheduled="daily")
    code, out, err = run("status")
    verdict, head, line = out.splitlines()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"OK: 1 job, the newest snapshot of each at most 36\.\d s old", verdict)
    assert head.split() == ["JOB", "STATUS", "NEWEST", "TAKEN", "AGE", "NEWEST", "VERIFIED", "TAKEN", "NEXT"]
    assert line.split()[:2] == ["nightly", "ok"]


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"age": 50 * HOUR}, "a snapshot has been overdue since"),
        ({"age": HOUR, "verified": "failed", "scheduled": None}, "the newest verification, of nightly.2026"),
        ({"age": -HOUR, "scheduled": None}, "which is in the future"),
    ],
)
def test_a_problem_is_the_first_line(run, ran, stored, says):
    age = stored.pop("age")
    ran(age, **stored)
    code, out, err = run("status")
    assert (code, err) == (1, "")
    assert out.startswith("PROBLEM: nightly: ")
    assert says in out.splitlines()[0]
    assert "\n  try: " in out
    assert not _json(run("status", "nightly", "--json"))["jobs"][0]["ok"]


def test_max_age_comes_from_the_configuration(run, ran, config):
    config.write_text(config.read_text() + 'max_age = "26h"\n')
    ran(25 * HOUR, scheduled=None)
    assert run("status")[0] == 0
    ran(27 * HOUR, scheduled=None)
    assert run("status")[0] == 1


def test_what_nothing_watches_is_said(run, ran):
    ran(1000 * HOUR, scheduled=None)
    code, out, _ = run("status")
    assert code == 0
    assert out.splitlines()[0].endswith("; neither scheduled nor with max_age: nightly")


def test_a_job_without_any_snapshot_is_a_problem(run, tmp_path):
    code, out, _ = run("status")
    assert code == 1
    assert out.startswith("PROBLEM: nightly: there is no snapshot")
    assert not (tmp_path / "state").exists()


def test_damage_is_a_problem(run, ran, tmp_path):
    one = ran(HOUR / 100)
    (tmp_path / "state/schedules/nightly.json").write_text("{")
    code, out, err = run("status")
    assert code == 1
    assert out.startswith("PROBLEM: 1 file of the state directory cannot be read")
    assert "schedules/nightly.json" in err
    (tmp_path / f"state/snapshots/{one.id}/manifest.json").write_text("{")
    assert run("status")[0] == 1


def test_a_storage_that_does_not_answer_is_a_warning(run, ran, monkeypatch):
    def silent(_ctx, _pool):
        raise StorageError("the pool does not answer")

    ran(HOUR / 100)
    monkeypatch.setattr("snapmgr.capacity.read.sample_pool", silent)
    code, out, err = run("status")
    assert (code, out.split(":")[0]) == (0, "OK")
    assert "cannot read how full /nowhere/snapshots is: the pool does not answer" in err


def test_status_asks_no_server_and_imports_little(ran, config):
    ran(HOUR)
    code = (
        "import sys; from snapmgr.cli.main import main\n"
        f"code = main(['-c', {str(config)!r}, 'status'])\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stderr.splitlines()[-1].split())
    assert not {"rich", "pymysql", "snapmgr.mysql.server", "snapmgr.verify.run"} & modules
    assert "oncalendar" in modules


@pytest.mark.usefixtures("root")
def test_every_key_is_documented(run, ran):
    ran(50 * HOUR, verified="failed")
    documented = set(
        re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", (DOCS / "reference" / "json.md").read_text())))
    )
    seen = set()

    def keys(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                seen.add(key)
                keys(inner)
        elif isinstance(value, list):
            for inner in value:
                keys(inner)

    for answer in (
        _install(run, "--json", "-n"),
        _install(run, "--json"),
        run("schedule", "show", "--json"),
        run("schedule", "remove", "nightly", "--json"),
        run("status", "--json"),
    ):
        keys(_json(answer))
    assert {"next_times", "overdue_since", "missing_files", "removed"} <= seen
    assert seen <= documented, seen - documented
