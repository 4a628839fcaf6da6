from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapmgr.contract.errors import CatalogError, ConfigError, MissingRequirementError, StorageError
from snapmgr.mysql.connect.client import Credentials
from snapmgr.mysql.lock.replication import Channel
from snapmgr.physical.tools.choose import choose_tool, tool_for
from snapmgr.physical.tools.copytool import fits, require_applicable
from snapmgr.physical.tools.infofile import SlaveInfo
from snapmgr.physical.tools.mariabackup import MariabackupTool, exact_sources
from snapmgr.physical.tools.request import ApplyRequest, BackupInfo, BrokenChainError
from snapmgr.physical.tools.toolrun import login_file, require_completed, run_tool
from snapmgr.physical.tools.toolwatch import Watch, phase_of

_LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("no_child_is_left")


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def staged(**changes) -> BackupInfo:
    given = {
        "tool": "mariadb-backup",
        "tool_version": "10.11.19-MariaDB",
        "flavor": "mariadb",
        "server_version": "10.11.19-MariaDB-log",
        "state": "prepared",
        "from_lsn": 0,
        "to_lsn": 100,
        "last_lsn": 120,
        "position": None,
    }
    return BackupInfo(**given | changes)


def test_a_tools_words_are_kept_and_its_end_is_told(tmp_path):
    seen: list[str] = []
    tool = script(tmp_path / "tool", "echo one; echo two >&2; echo 'half a'; printf 'completed OK!'")
    ended = run_tool([tool], log=str(tmp_path / "log"), watch=lambda _pid, lines: seen.extend(lines))
    assert ended.completed
    assert ended.lines == ("one", "two", "half a", "completed OK!")
    assert (tmp_path / "log").read_text() == "one\ntwo\nhalf a\ncompleted OK!"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert list(ended.lines[: len(seen)]) == seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("echo 'all is well'", "without its final"),
        # Its last words, not words somewhere.
        ("echo 'completed OK!'; echo 1; echo 2; echo 3", "without its final"),
        ("echo 'completed OK!'; exit 1", "exit code 1"),
        ("kill -9 $$", "signal 9"),
        ("echo 'No space left on device'; exit 1", "file system is full"),
    ],
)
def test_a_tool_that_did_not_complete_has_failed_whatever_its_exit_code(tmp_path, words, message):
    ended = run_tool([script(tmp_path / "tool", words)], log=str(tmp_path / "log"))
    with pytest.raises(StorageError, match=message) as failure:
        require_completed(ended, "tool: the backup")
    assert str(tmp_path / "log") in failure.value.hint


def test_a_tool_that_takes_too_long_is_ended_even_if_it_does_not_listen(tmp_path):
    tool = script(tmp_path / "tool", "trap '' TERM; echo $$; while :; do sleep 0.1; done")
    with pytest.raises(StorageError, match="did not finish within"):
        run_tool([tool], log=str(tmp_path / "log"), time_limit_s=0.3)
    assert not os.path.exists(f"/proc/{(tmp_path / 'log').read_text().split()[0]}")


def test_a_tool_is_ended_with_its_children_when_we_are_interrupted(tmp_path):
    def interrupt(_pid: int, lines: list[str]) -> None:
        if lines:
            raise KeyboardInterrupt

    tool = script(tmp_path / "tool", "trap '' TERM; sleep 1000 & echo $$ $!; wait; wait")
    with pytest.raises(KeyboardInterrupt):
        run_tool([tool], log=str(tmp_path / "log"), watch=interrupt)
    pids = (tmp_path / "log").read_text().split()
    assert len(pids) == 2
    # The children's end is not ours to wait for: the signal has been sent.
    until(lambda: not any(alive(pid) for pid in pids))


def test_a_tool_ends_when_we_are_killed(tmp_path):
    tool = script(tmp_path / "tool", "echo $$; exec sleep 1000")
    code = f"from snapmgr.physical.tools.toolrun import run_tool; run_tool([{tool!r}], log={str(tmp_path / 'log')!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().endswith("\n"))
        pid = (tmp_path / "log").read_text().strip()
        assert alive(pid)
        process.kill()
    until(lambda: not alive(pid))


def test_hashes_of_passwords_stay_out_of_the_log(tmp_path):
    words = "1.GRANT USAGE ON *.* TO `poor`@`localhost` IDENTIFIED BY PASSWORD '*462366917EEDD1970A48E87D8EF59EB6'"
    tool = script(tmp_path / "tool", f'echo before; echo "{words.replace("`", "")}"; echo after; exit 1')
    ended = run_tool([tool], log=str(tmp_path / "log"))
    text = (tmp_path / "log").read_text()
    assert "462366917" not in text + "".join(ended.lines)
    assert text.splitlines()[0] == "before"
    assert text.splitlines()[2] == "after"
    assert "IDENTIFIED BY PASSWORD '****" in text


def test_a_log_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path):
    with pytest.raises(CatalogError, match="log"):
        run_tool([script(tmp_path / "tool", f"touch {tmp_path}/ran")], log=str(tmp_path / "none" / "log"))
    assert not (tmp_path / "ran").exists()


def test_the_log_of_an_earlier_run_is_replaced_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    run_tool([script(tmp_path / "tool", "echo completed OK!")], log=str(tmp_path / "log"))
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "log").read_text() == "completed OK!\n"


def test_a_login_is_a_file_for_us_alone_that_is_nowhere_on_disk(tmp_path):
    given = tmp_path / "my.cnf"
    given.write_text('[client]\nuser=me\npassword="a#b\'c"\n')
    given.chmod(0o600)
    with login_file(Credentials(socket="/run/s", defaults_file=str(given))) as path:
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert Path(path).read_text() == '[client]\nsocket = "/run/s"\nuser = "me"\npassword = "a#b\'c"\n'
        assert os.readlink(path).startswith("/memfd:")
    assert not os.path.exists(path)


def test_quotes_and_backslashes_of_a_password_are_kept(tmp_path):
    given = tmp_path / "my.cnf"
    given.write_text('[client]\nuser=me\npassword=a"b\\c\n')
    given.chmod(0o600)
    with login_file(Credentials(socket="/run/s", defaults_file=str(given))) as path:
        assert 'password = "a\\"b\\\\c"' in Path(path).read_text()


def test_the_tool_of_a_server_is_chosen_by_its_flavor():
    assert choose_tool("auto", "mariadb", "10.11.19-MariaDB").name == "mariadb-backup"
    assert choose_tool("xtrabackup", "mysql", "8.4.3").name == "xtrabackup"
    assert choose_tool("clone", "mysql", "9.7.4").name == "clone"
    for name, flavor in (("clone", "mariadb"), ("xtrabackup", "mariadb"), ("mariadb-backup", "mysql")):
        with pytest.raises(ConfigError):
            choose_tool(name, flavor, "1.2.3")


def test_xtrabackup_is_taken_where_it_fits_the_server_else_clone(tmp_path):
    old = script(tmp_path / "xtrabackup", "echo 'xtrabackup version 8.0.35-31 based on MySQL server 8.0.35'")
    assert choose_tool("auto", "mysql", "8.0.30", program=old).name == "xtrabackup"
    assert choose_tool("auto", "mysql", "9.7.4", program=old).name == "clone"
    (reason,) = choose_tool("xtrabackup", "mysql", "9.7.4", program=old).missing()
    assert "has version 8.0.35-31, the server 9.7.4" in reason.what


def test_a_tool_that_is_not_there_or_is_none_is_lacking(tmp_path):
    (reason,) = MariabackupTool(program=str(tmp_path / "none")).missing()
    assert "does not exist" in reason.what
    assert "apt-get install mariadb-backup" in reason.hint
    (reason,) = MariabackupTool(program=script(tmp_path / "tool", "echo hello")).missing()
    assert "is not mariadb-backup" in reason.what


def test_a_clone_has_nothing_to_apply():
    with pytest.raises(MissingRequirementError, match="needs no prepare"):
        tool_for(staged(tool="clone", flavor="mysql"))
    assert tool_for(staged()).name == "mariadb-backup"


@pytest.mark.parametrize(
    ("tool", "server", "answer"),
    [
        ("10.11.2", "10.11.19-MariaDB", True),
        ("10.11.19", "11.8.6", False),
        ("8.0.35", "8.4.3", False),
        ("1.2.3", "", True),
    ],
)
def test_a_tool_fits_servers_of_its_series_alone(tool, server, answer):
    assert fits(tool, server) is answer


@pytest.mark.parametrize(
    ("before", "increment", "kind"),
    [
        ({}, {"from_lsn": 100, "to_lsn": 150}, None),
        ({"state": "raw"}, None, None),
        ({"state": "raw"}, {"from_lsn": 100, "to_lsn": 150}, StorageError),
        ({}, {"from_lsn": 101, "to_lsn": 150}, BrokenChainError),
        ({}, {"from_lsn": 99, "to_lsn": 150}, BrokenChainError),
        ({}, {"from_lsn": 0, "to_lsn": 150}, BrokenChainError),
        ({}, {"from_lsn": 100, "to_lsn": 150, "server_version": "11.4.2-MariaDB"}, BrokenChainError),
        ({"from_lsn": 50, "state": "raw"}, None, StorageError),
        ({"tool": "xtrabackup", "state": "redo-applied"}, None, StorageError),
    ],
)
def test_an_increment_is_applied_only_to_what_it_follows_on(before, increment, kind):
    request = ApplyRequest(folder="/full", log="/log", increment=None if increment is None else "/inc")
    follows = None if increment is None else staged(**{"state": "raw"} | increment)
    if kind is None:
        require_applicable(staged(**before), follows, request, "mariadb-backup")
        return
    with pytest.raises(StorageError) as failure:
        require_applicable(staged(**before), follows, request, "mariadb-backup")
    assert type(failure.value) is kind


def test_what_xtrabackup_has_prepared_takes_no_more_increments():
    request = ApplyRequest(folder="/full", log="/log", increment="/inc")
    percona = {"tool": "xtrabackup", "flavor": "mysql", "server_version": "8.4.3"}
    increment = staged(**percona, state="raw", from_lsn=100, to_lsn=150)
    require_applicable(staged(**percona, state="redo-applied"), increment, request, "xtrabackup")
    with pytest.raises(BrokenChainError, match="without --apply-log-only"):
        require_applicable(staged(**percona, state="prepared"), increment, request, "xtrabackup")


@pytest.mark.parametrize(
    "option",
    ["--stream=xbstream", "--target-dir=/x", "--password=x", "--no_lock", "--databases=a", "-p", "x", "--user"],
)
def test_options_that_would_leave_data_out_or_are_ours_are_refused(tmp_path, option):
    with pytest.raises(ConfigError, match="not allowed"):
        MariabackupTool().apply(ApplyRequest(folder=str(tmp_path), log=str(tmp_path / "log"), options=(option,)))


def test_only_what_the_tool_wrote_down_of_a_source_is_its_position():
    def channel(name: str, *, by_gtid: bool) -> Channel:
        return Channel(
            name=name,
            host="h",
            port=1,
            applies=True,
            file="later",
            offset=9,
            by_gtid=by_gtid,
            gtid="",
            error="",
            until=False,
        )

    info = SlaveInfo(gtid="0-1-5", files={"a": ("m.1", 4)})
    found = exact_sources((channel("a", by_gtid=False), channel("b", by_gtid=False), channel("c", by_gtid=True)), info)
    assert [(one.channel, one.file, one.offset, one.gtid) for one in found] == [
        ("a", "m.1", 4, ""),
        ("c", "", 0, "0-1-5"),
    ]


def test_the_progress_is_told_in_words_with_the_lag_where_the_tool_tells_it():
    told = []
    watch = Watch(told.append, 1000, current_lsn=lambda: 5000)
    watch.look(os.getpid(), ["[01] 2026-11-22 00:12:57 Copying ./a/b.ibd to /staging/a/b.ibd"])
    watch.look(os.getpid(), [">> log scanned up to (4500)", "[00] 2026-11-22 Starting BACKUP STAGE BLOCK_COMMIT"])
    assert [(one.phase, one.lag_bytes, one.expected_bytes) for one in told] == [
        ("copying data files", None, 1000),
        ("commits are blocked", 500, 1000),
    ]
    assert phase_of("hello") is None
    # A short phase begins and ends between two looks.
    watch.look(os.getpid(), ["[01] Executing FLUSH TABLES WITH READ LOCK", "[01] All tables unlocked", "Streaming x"])
    assert [one.phase for one in told[2:]] == ["finishing", "copying data files"]


def test_redo_log_that_was_overwritten_ends_a_backup_at_once_and_a_server_that_runs_ahead_does_not():
    def watch(*lsns: int) -> Watch:
        now = iter((*lsns, *[lsns[-1]] * 9))
        return Watch(lambda _: None, current_lsn=lambda: next(now), redo_bytes=1000)

    waits = ["[00] 2026-11-22 00:36:21 Retrying read of log at LSN=5000"]
    behind = watch(6001)
    behind.look(os.getpid(), waits * 2)
    behind.look(os.getpid(), waits)
    with pytest.raises(StorageError, match="overwrote redo log"):
        behind.look(os.getpid(), waits)
    # All is still there; or the tool has come further meanwhile.
    for lsns, following in ((6000,), 5000), ((9000,), 8500):
        fine = watch(*lsns)
        fine.look(os.getpid(), waits)
        fine.look(os.getpid(), [])
        fine.look(os.getpid(), [waits[0].replace("5000", str(following))])


def test_a_prepare_tells_how_much_redo_log_is_left():
    told = []
    watch = Watch(told.append)
    # As mariadb-backup 10.11 printed them.
    for line in (
        "2026-11-22  0:29:45 0 [Note] InnoDB: Starting crash recovery from checkpoint LSN=44910",
        "2026-11-22  0:29:45 0 [Note] InnoDB: End of log at LSN=97632871",
        "2026-11-22  0:29:45 0 [Note] InnoDB: To recover: LSN 21623326/97632871; 1788 pages",
        "2026-11-22  0:29:47 0 [Note] InnoDB: Starting shutdown...",
    ):
        watch.look(os.getpid(), [line])
    assert [(one.phase, one.lag_bytes) for one in told] == [
        ("applying redo log", None),
        ("writing changed pages", 97632871 - 21623326),
    ]


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(holds) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
