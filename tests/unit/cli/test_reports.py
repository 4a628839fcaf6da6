"""What the commands report: for people, as JSON, while shells complete words, and while the work goes on."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace

from snapmgr import jobrun as run_module
from snapmgr.capacity.read import _path
from snapmgr.capacity.series import CapacitySample, CapacitySeries, PoolCapacity
from snapmgr.catalog.manifest import QuiesceRecord, encode
from snapmgr.cli.main import COMPLETE_VARIABLE, main
from snapmgr.cli.output import Console, format_table
from snapmgr.context import Context
from snapmgr.contract.errors import NotFoundError, NotQuiescedError, StorageError
from snapmgr.contract.records import Usage
from support.documents import conforms
from support.sample import POOL, manifest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.usefixtures("catalog")
def test_list_shows_each_snapshot_on_a_line(run):
    code, out, err = run("list")
    assert (code, err) == (0, "")
    head, first, second, third = out.splitlines()
    assert head.split() == ["ID", "JOB", "TAKEN", "STATE", "LEVEL", "HELD", "VERIFIED", "AT", "NOTES"]
    shown = ["00000000", "nightly", "2026-01-31T02:30:00Z", "ready", "backup-lock", "4.2", "ms"]
    assert first.split() == [*shown, "2026-01-31T02:30:00Z", "mounted", "at", "/mnt/look"]
    assert "FAILED 2026-01-31T02:30:00Z" in second
    assert third.split()[-1] == "-"
    assert {line.index("backup-lock") for line in (first, second, third)} == {head.index("LEVEL")}


def test_list_shows_how_full_the_own_space_of_a_ready_snapshot_is(run, catalog):
    shared = CapacitySeries(name="data of vg/pool", when_full="origin_errors", size_bytes=100, samples=_samples(90))
    own = [
        CapacitySeries(
            name=f"CoW table of {number}",
            when_full="snapshot_lost",
            size_bytes=100,
            native_id=f"n{number}",
            samples=_samples(30),
        )
        for number in (0, 1)
    ]
    capacity = PoolCapacity(backend=POOL.backend, pool_id=POOL.id, series=(shared, *own))
    catalog.write(manifest(1, state="broken", reason="it overflowed"))
    path = _path(catalog, POOL)
    path.parent.mkdir()
    path.write_bytes(encode(replace(capacity, series=(shared,))))
    assert "% full" not in run("list")[1]
    path.write_bytes(encode(capacity))
    _, first, second, third = run("list")[1].splitlines()
    assert first.endswith("mounted at /mnt/look, 30% full, not filling")
    assert second.endswith("it overflowed")
    assert "full" not in third


def _samples(used_bytes):
    return tuple(
        CapacitySample(at=datetime.now(UTC) - timedelta(hours=hours), used_bytes=used_bytes, size_bytes=100)
        for hours in (2, 1, 0)
    )


def test_a_table_is_aligned_and_shows_control_characters():
    rows = [["100%s", "x"], ["a\x1b[31m\nb", ""], ("é", "yy")]
    assert format_table(("ONE", "TWO"), rows) == [
        "ONE           TWO",
        "100%s         x",
        r"a\x1b[31m\nb",
        "é             yy",
    ]


class _Sized:
    """Storage that can tell one size cheaply and one at length, has lost a snapshot, and does not answer for a pool."""

    asked: ClassVar[list[str]] = []

    def usage(self, ref, *, exact=False):
        self.asked.append(f"{ref.native_id}{' exactly' if exact else ''}")
        if ref.pool.id == "/away":
            raise StorageError("the pool is not mounted")
        if ref.native_id == "n1":
            raise NotFoundError("n1 is gone")
        return Usage(exclusive_bytes=3 << 20 if ref.native_id == "n0" or (exact and ref.native_id == "log") else None)


def test_list_shows_sizes_if_asked(run, catalog, monkeypatch):
    monkeypatch.setattr(Context, "backend", lambda *_: _Sized())
    monkeypatch.setattr(_Sized, "asked", [])
    (first,) = manifest(0).members
    away = [replace(first, ref=replace(first.ref, pool=replace(POOL, id="/away"), native_id=f"a{n}")) for n in (0, 1)]
    catalog.write(manifest(3, members=(away[0],)))
    catalog.write(manifest(4, members=(away[1], away[0])))
    catalog.write(manifest(5, members=(first, replace(first, ref=replace(first.ref, native_id="log")))))
    catalog.write(manifest(6, members=(first, manifest(2).members[0])))
    catalog.write(manifest(7, state="broken"))
    assert "exclusive" not in run("list")[1]
    assert {one["exclusive_bytes"] for one in json.loads(run("list", "--json")[1])["snapshots"]} == {None}
    assert _Sized.asked == []
    code, out, err = run("list", "--size")
    head, *lines = out.splitlines()
    at = head.index("SIZE")
    assert [line[at:].split("  ")[0] for line in lines] == ["3.0 MiB", "-", "-", "-", "-", "6.0 MiB", "-", "-"]
    assert head.split()[-2:] == ["SIZE", "NOTES"]
    assert _Sized.asked == ["n0", "n1", "n2", "n2 exactly", "a0", "n0", "log", "log exactly", "n0", "n2", "n2 exactly"]
    assert (code, err.count("the pool is not mounted"), err.count("n1 is gone")) == (0, 1, 1)
    document = json.loads(run("list", "--size", "--json")[1])
    conforms(document)
    sizes = [one["exclusive_bytes"] for one in document["snapshots"]]
    assert sizes == [3 << 20, None, None, None, None, 6 << 20, None, None]


def test_list_names_what_is_damaged_and_shows_the_rest(run, catalog):
    (catalog.path / "snapshots" / manifest(1).id / "manifest.json").write_text("{ not json")
    code, out, err = run("list")
    assert code == 1
    assert len(out.splitlines()) == 3
    assert manifest(1).id in err
    code, out, _ = run("list", "--json")
    assert code == json.loads(out)["exit_code"] == 1
    assert [Path(one["path"]).name for one in json.loads(out)["damaged"]] == [manifest(1).id]


def test_list_before_the_first_backup_makes_nothing(run, tmp_path):
    code, out, err = run("list")
    assert (code, out) == (0, "")
    assert f"no snapshots in {tmp_path / 'state'}, which does not exist; if it was lost, see: snapmgr doctor" in err
    assert not (tmp_path / "state").exists()


def test_a_directory_has_no_lock_whose_time_could_be_told(run, catalog):
    level = QuiesceRecord(level="none", why="a plain directory", proof="p", attempts=1, waited_s=0.0, held_s=0.0)
    catalog.write(manifest(7, job="files", source="directory", quiesce=level, position=None, server=None))
    assert run("list", "files")[1].splitlines()[1].split()[-2:] == ["-", "-"]
    shown = run("show", "files@latest")[1]
    assert "a plain directory" in shown
    assert "lock " not in shown


@pytest.mark.parametrize("arguments", [("mount", "--list"), ("umount", "--all"), ("umount", "--all", "-n")])
def test_nothing_to_do_is_said(run, arguments):
    assert run(*arguments) == (0, "", "nothing is mounted\n")


@pytest.mark.usefixtures("catalog")
def test_show_says_everything_and_survives_a_storage_that_does_not(run):
    code, out, _ = run("show", manifest(0).short_id)
    assert code == 0
    for part in (
        "binlog.000001:325, GTID 0-1-7",
        "waited 3.1 ms, held 4.2 ms",
        "it answered",
        "/mnt/look",
        "size unknown",
    ):
        assert part in out
    document = json.loads(run("show", "nightly.20260131T0230", "--json")[1])["snapshot"]
    assert document["position"] == {"file": "binlog.000001", "offset": 325, "gtid": "0-1-7"}
    assert document["members"][0]["usage"]["problem"]


@pytest.mark.usefixtures("catalog")
def test_prune_says_why_and_a_dry_run_changes_nothing(run, tmp_path):
    def state():
        return {str(path): path.stat().st_mtime_ns for path in sorted((tmp_path / "state").rglob("*"))}

    before = state()
    code, out, _ = run("prune", "--dry-run")
    assert code == 0
    rows = {line.split("nightly.")[1].split()[0]: line for line in out.splitlines()[1:]}
    newest, middle, oldest = (rows[manifest(number).id.removeprefix("nightly.")] for number in (2, 1, 0))
    assert newest.startswith("keep ")
    assert "newest READY" in newest
    assert middle.startswith("would delete ")
    assert "newest VERIFIED, in use" in oldest
    assert state() == before
    document = json.loads(run("prune", "-n", "--json")[1])
    assert [one["id"] for one in document["jobs"][0]["delete"]] == [manifest(1).id]
    assert document["jobs"][0]["deleted"] == []


def test_prune_leaves_and_names_jobs_that_are_not_configured(run, catalog):
    catalog.write(manifest(5, job="old"))
    _, out, err = run("prune", "-n")
    assert "old" not in out
    assert "job old is no longer configured" in err


def test_config_validate_names_everything_that_is_wrong(run, config):
    assert run("config", "validate")[0] == 0
    config.write_text('[job.a]\nsource = "mysql"\n[job.b]\nsource = "oracle"\n')
    code, out, err = run("config", "validate", "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert document["valid"] is False
    assert len(document["problems"]) == 2
    assert "job.a" in err
    assert "job.b.source" in err


def test_config_validate_knows_the_backends_and_their_keys(run, config):
    job = '[job.a]\nsource = "directory"\npath = "/srv"\n'
    config.write_text(job + 'backend = "zfs"\n[backend.btrfs]\nfoldr = "x"\n[backend.juices]\n')
    code, out, _ = run("config", "validate", "--json")
    assert code == 2
    of_job, of_table, unknown = json.loads(out)["problems"]
    installed = "btrfs, juicefs, lvm, reflink"
    assert f"{config}: job.a.backend: there is no backend 'zfs'; installed backends: {installed}" in of_job
    assert of_table == f"{config}: backend.btrfs.foldr: unknown key; did you mean 'folder'?"
    assert f"{config}: backend.juices: there is no backend 'juices'" in unknown
    config.write_text(job + 'backend = "reflink"\n[backend.reflink]\nstore = "/srv/copies"\n')
    assert run("config", "validate")[0] == 0


def test_doctor_speaks_without_a_configuration_too(tmp_path, capsys):
    code = main(["--config", str(tmp_path / "none.toml"), "doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert code == 1
    assert {one["area"] for one in findings} == {"config", "backend"}


# ------------------------------------------------------------------------------------------------------ json and docs


def _keys(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            # A server's variables: their names are data.
            if path[-1:] != ("settings",):
                yield key
            yield from _keys(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, path)


@pytest.mark.usefixtures("catalog")
def test_every_key_is_documented(run):
    documented = set(
        re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", (DOCS / "reference" / "json.md").read_text())))
    )
    commands = [
        ["list"],
        ["show", "latest"],
        ["show", "nothing"],
        ["prune", "-n"],
        ["mount", "--list"],
        ["mount", "latest", "-n"],
        ["verify", "latest", "-n"],
        ["umount", "--all", "-n"],
        ["backup", "--all", "-n"],
        ["pin", "latest", "-n"],
        ["unpin", "latest", "-n"],
        ["delete", "latest", "-n"],
        ["config", "validate"],
        ["doctor"],
    ]
    seen = set()
    for command in commands:
        code, out, _ = run(*command, "--json")
        document = json.loads(out)
        assert (document["schema_version"], document["exit_code"]) == (1, code), command
        assert document["command"] == ("config validate" if command[0] == "config" else command[0])
        seen |= set(_keys(document))
    assert seen <= documented, seen - documented
    # The comparison sees something.
    assert {"lock_held_s", "native_id", "exclusive_bytes", "lease_id", "reasons", "subject"} <= seen


@pytest.mark.usefixtures("catalog")
def test_times_are_utc_and_sizes_whole(run):
    document = json.loads(run("show", "latest", "--json")[1])["snapshot"]
    for key in ("created_at", "taken_at", "proved_at"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", document[key])


# ------------------------------------------------------------------------------------------------------- several jobs


def _three_jobs(config):
    body = f'source = "directory"\npath = "{config.parent}/source"\n'
    jobs = "".join(f"[job.{name}]\n{body}" for name in ("one", "two", "three"))
    config.write_text(f'state_dir = "{config.parent}/state"\n{jobs}')


def test_the_others_go_on_after_a_failure_a_bug_included(run, config, monkeypatch):
    def backup(_ctx, job):
        if job.name == "one":
            raise NotQuiescedError("it would not hold still")
        if job.name == "two":
            raise ZeroDivisionError
        return manifest(1, job=job.name)

    _three_jobs(config)
    monkeypatch.setattr(run_module, "backup", backup)
    code, out, err = run("backup", "--all", "--json")
    document = json.loads(out)
    assert [(job["job"], job["exit_code"]) for job in document["jobs"]] == [("one", 4), ("two", 1), ("three", 0)]
    assert code == document["exit_code"] == 1
    assert "job one: it would not hold still" in err
    assert "ZeroDivisionError" in err
    assert run("backup", "one", "three")[0] == 4


def test_after_an_interruption_no_job_is_begun(run, config, monkeypatch):
    begun = []

    def backup(_ctx, job):
        begun.append(job.name)
        if job.name == "two":
            os.kill(os.getpid(), signal.SIGINT)
        return manifest(1, job=job.name)

    _three_jobs(config)
    monkeypatch.setattr(run_module, "backup", backup)
    code, out, _ = run("backup", "--all", "--json")
    assert code == 130
    assert begun == ["one", "two"]
    assert [job["exit_code"] for job in json.loads(out)["jobs"]] == [0, 130, None]


# --------------------------------------------------------------------------------------------------------- completion


def _complete(config, *words):
    asked = {
        COMPLETE_VARIABLE: "bash_complete",
        "COMP_WORDS": " ".join(["snapmgr", "--config", str(config), *words]),
        "COMP_CWORD": str(len(words) + 2),
    }
    done = subprocess.run(
        [sys.executable, "-m", "snapmgr"], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.usefixtures("catalog")
def test_completion_knows_commands_jobs_and_snapshots(config):
    assert _complete(config, "ver") == ["verify"]
    assert _complete(config, "backup", "ni") == ["nightly"]
    assert _complete(config, "show", "nightly@") == ["nightly@latest", "nightly@latest-verified"]
    assert _complete(config, "show", "00000001") == ["00000001"]
    assert manifest(2).id in _complete(config, "show", "nightly.")
    assert manifest(2).id in _complete(config, "prepare", "nightly.")
    # The shell completes it itself.
    assert _complete(config, "prepare", "/srv/b") == ["/srv/b"]
    assert _complete(config, "umount", "/mnt/l") == ["/mnt/look"]
    assert _complete(config, "umount", "") == ["/mnt/look"]
    assert _complete(config, "umount", "ni") == [manifest(0).id]


def test_completion_is_silent_about_a_broken_configuration(config):
    config.write_text("nonsense = ")
    assert _complete(config, "backup", "n") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell, capsys):
    assert main(["completion", shell]) == 0
    assert COMPLETE_VARIABLE in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------------- console


def test_progress_off_a_terminal_is_a_few_plain_lines(capsys):
    console = Console()
    for done in range(1001):
        console.progress("checking tables", done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["checking tables: 0 of 1000", "checking tables: 1000 of 1000"]


def test_quiet_says_only_what_needs_attention(capsys):
    console = Console(quiet=True)
    console.tell("arming")
    console.progress("checking", 1, 2)
    console.tell("warning: the pool is nearly full")
    console.fail(NotQuiescedError("no", hint="try"))
    assert capsys.readouterr().err.splitlines() == [
        "warning: the pool is nearly full",
        "snapmgr: error: no",
        "hint: try",
    ]


# ----------------------------------------------------------------------------------------------------------- terminals


def _on_a_terminal(*command, columns=200, code=0, **variables):
    """Run a command whose stdout and stderr are a terminal, and return what it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment | variables
    ) as process:
        os.close(theirs)
        written = b""
        # At its end reading fails with EIO.
        with suppress(OSError):
            while piece := os.read(ours, 1 << 16):
                written += piece
    os.close(ours)
    assert process.returncode == code, written.decode()
    return written.decode()


def test_a_terminal_gets_colours_and_names_still_cannot_control_it(config, catalog):
    catalog.write(manifest(9, state="broken", reason="gone \x1b[2J[bold]x"))
    command = (sys.executable, "-m", "snapmgr", "--config", str(config), "list")
    written = _on_a_terminal(*command, TERM="xterm-256color")
    assert "\x1b[32mready" in written
    assert "\\x1b[2J[bold]x" in written
    assert "\x1b[2J" not in written
    for plain in ({"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}):
        assert "\x1b[3" not in _on_a_terminal(*command, **plain)


@pytest.mark.parametrize("columns", [30, 80, 120])
def test_a_narrow_terminal_cuts_no_words_off(config, catalog, columns):
    catalog.write(manifest(9, pinned=True, pin_reason="before the migration"))
    told = {"TERM": "xterm", "NO_COLOR": "1", "columns": columns}
    snapmgr = (sys.executable, "-m", "snapmgr", "--config", str(config))
    listed = _on_a_terminal(*snapmgr, "list", **told)
    for word in ("00000009", "nightly", "2026-01-31T11:30:00Z", "ready", "backup-lock", "4.2 ms", "migration"):
        assert word in listed
    found = _on_a_terminal(*snapmgr, "doctor", columns=columns, code=1, TERM="xterm-256color")
    assert "\x1b[31mproblem\x1b[0m" in found
    plain = re.sub(r"\x1b\[[0-9;]*m", "", found).replace("\r\n", "\n")
    with_hints = subprocess.run([*snapmgr, "doctor"], capture_output=True, text=True, check=False)
    assert with_hints.stdout in plain


def test_a_bar_has_no_thread_and_lines_do_not_disturb_it():
    code = """
import threading
from snapmgr.cli.output import Console, format_table
console = Console()
for done in range(4):
    console.progress("checking", done, 4)
    # A fork beside a thread may deadlock, and we fork.
    assert threading.active_count() == 1
    if done == 2:
        console.tell("a line")
console.progress("checking", 4, 4)
console.close()
"""
    written = _on_a_terminal(sys.executable, "-c", code, TERM="xterm-256color")
    assert "2/4" in written
    assert "a line\r\n" in written
    # The cursor is shown again, after the last thing that was drawn.
    assert written.rindex("\x1b[?25h") > written.rindex("checking")
