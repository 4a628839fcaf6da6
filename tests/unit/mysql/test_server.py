"""The pure parts of throwaway servers: options, logs, and paths that must not lead outside the copy."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Literal

import pytest

from snapmgr.catalog.manifest import ServerRecord
from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.datadir.copy import IsolatedCopy, absolute_paths, isolate_copy
from snapmgr.mysql.datadir.relocation import relocated_options
from snapmgr.mysql.datadir.tablespace import dictionary_paths, name_spaces, page_size
from snapmgr.mysql.server.log import damage, describe_end, excerpt, lacks_keys
from snapmgr.mysql.server.options import throwaway_options
from snapmgr.mysql.server.program import ServerBinary, find_server
from snapmgr.mysql.server.throwaway import _as_owner

MARIADB = ServerBinary(path="/usr/sbin/mariadbd", flavor="mariadb", version="10.11.6-MariaDB-0+deb12u1")
MYSQL = ServerBinary(path="/usr/sbin/mysqld", flavor="mysql", version="8.4.3")


def options(
    binary: ServerBinary, settings: dict[str, str], *, memory_bytes: int = 256 * 1024**2, uid: int = 100
) -> str:
    copy = IsolatedCopy(
        datadir="/c/d",
        home="/c/d",
        settings=settings,
        paths={"innodb_undo_directory": "/c/undo"},
        log_bin_options=("--log-bin=/c/d/b",),
        covers=(),
    )
    found = throwaway_options(binary, copy, memory_bytes=memory_bytes, run_dir="/r", socket="/r/s", uid=uid)
    # It must come first, or it has no effect.
    assert found[0] == "--no-defaults"
    return " ".join(found)


def test_a_mariadb_server_is_alone_and_leaves_no_trace():
    text = options(MARIADB, {"innodb_page_size": "4096", "gtid_mode": "ON", "innodb_undo_directory": "../undo"})
    for option in (
        "--skip-networking",
        "--skip-slave-start",
        "--event-scheduler=DISABLED",
        "--innodb-page-size=4096",
        "--loose-gtid-mode=ON",
        "--innodb-undo-directory=/c/undo",
        "--log-bin=/c/d/b",
        "--expire-logs-days=0",
        "--aria-recover-options=OFF",
        "--myisam-recover-options=OFF",
    ):
        assert f" {option} " in f"{text} "
    assert "../undo" not in text
    assert "--user=root" not in text
    assert "--user=root" in options(MARIADB, {}, uid=0)


def test_a_mysql_server_purges_and_replicates_nothing_by_its_versions_words():
    text = options(MYSQL, {})
    assert "--skip-replica-start" in text
    assert "--loose-binlog-expire-logs-seconds=0" in text
    assert "aria" not in text
    assert "pool-size-max" not in text
    old = ServerBinary(path="x", flavor="mysql", version="8.0.25")
    assert "--skip-slave-start" in options(old, {})


@pytest.mark.parametrize(("memory_bytes", "pool"), [(0, "32M"), (80 * 1024**2, "32M"), (1024**3, "976M")])
def test_memory_is_bounded_from_both_sides(memory_bytes, pool):
    text = options(MARIADB, {}, memory_bytes=memory_bytes)
    assert f"--innodb-buffer-pool-size={pool} " in text
    # No more addresses are reserved than that.
    assert f"--loose-innodb-buffer-pool-size-max={pool} " in text


def test_each_server_gets_another_id():
    assert options(MARIADB, {}) != options(MARIADB, {})


CRASH = """2026-01-02 03:04:05 0 [Note] InnoDB: Starting
2026-01-02 03:04:05 0 [Warning] InnoDB: retry because of error 28, No space left? unknown variable 'loose-x'
2026-01-02 03:04:06 0 [ERROR] InnoDB: Page [page id: space=5, page number=3] log sequence number 99 is in the future!
2026-01-02 03:04:06 0 [ERROR] InnoDB: Page [page id: space=5, page number=3] log sequence number 99 is in the future!
260102  3:04:06 [ERROR] mariadbd got signal 6 ;
stack line
"""


def test_a_crash_is_told_by_the_lines_that_matter():
    end = describe_end(CRASH, -6)
    assert end.text.count("in the future") == 1
    assert "got signal 6" in end.text
    assert "stack line" not in end.text
    assert "(signal 6)" in end.text
    assert not end.machine
    assert "not from one instant" in (end.hint or "")


@pytest.mark.parametrize(
    ("line", "code", "machine"),
    [
        ("[ERROR] InnoDB: preallocating 12582912 bytes for file ./ibtmp1 failed with error 28", 1, True),
        ("[ERROR] mariadbd: Disk is full writing './b.1' (Errcode: 28 \"No space left on device\")", None, True),
        ("[ERROR] InnoDB: Cannot allocate memory for the buffer pool", 1, True),
        ("[ERROR] mariadbd: unknown variable 'nonsense=1'", 7, True),
        ("[ERROR] InnoDB: Upgrade after a crash is not supported.", 1, True),
        ("[Note] all is well", -9, True),
        ("[ERROR] [MY-013063] [InnoDB] Redo log was encrypted, but keyring is not loaded.", 1, True),
        (
            "[ERROR] InnoDB: Obtaining redo log encryption key version 1 failed (4294967295). Maybe the key or the "
            "required encryption key management plugin was not found.",
            1,
            True,
        ),
        (
            "[ERROR] [MY-011087] [Server] Different lower_case_table_names settings for server ('1') and data "
            "dictionary ('0').",
            1,
            True,
        ),
        ("[ERROR] [MY-014060] [Server] Invalid MySQL server downgrade: Cannot downgrade from 90800 to 90704.", 1, True),
        ("[ERROR] [MY-013862] [InnoDB] Neither found #innodb_redo subdirectory, nor ib_logfile* files in ./", 1, False),
        ("[ERROR] InnoDB: Encryption key is not found for ./m/enc.ibd", 1, True),
        # MariaDB's advice is no diagnosis: its binary log is damaged, or encrypted.
        (
            "[ERROR] Crash recovery failed. Either correct the problem (if it's, for example, out of memory error) and "
            "restart, or delete (or rename) binary log and start serverwith --tc-heuristic-recover={commit|rollback}",
            1,
            False,
        ),
        ("[ERROR] Found 1 prepared transactions! It means that …", 1, False),
        ("[ERROR] InnoDB: The data file './ibdata1' must be writable", 1, False),
        ("[ERROR] InnoDB: Database page corruption on disk or a failed read", -6, False),
        ("[ERROR] InnoDB: error 281 of page number: 280", 1, False),
        ("", 1, False),
    ],
)
def test_the_machine_is_told_from_the_data(line, code, machine):
    assert describe_end(f"2026-01-02  3:04:06 0 {line}\n" if line else "", code).machine is machine


def test_an_excerpt_is_bounded_and_without_time_stamps():
    log = "".join(f"2026-01-02  3:04:06 {number} [ERROR] {'x' * 500} {number}\n" for number in range(1000))
    text = excerpt(log)
    assert len(text) < 2000
    assert text.endswith("x 999")
    assert "2026" not in text
    assert excerpt("2026-01-02T03:04:06.123456Z 0 [Note] only this\n") == "[Note] only this"
    assert excerpt("") == ""


def test_a_copy_within_itself_needs_no_cover(tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "auto.cnf").write_text("[auto]\nserver-uuid=1\n")
    (tmp_path / "binlog.index").write_text("/live/d/binlog.000001\n./binlog.000002\n")
    settings = {"log_bin_basename": "binlog", "log_bin_index": "binlog.index", "innodb_log_group_home_dir": "."}
    copy = isolate_copy(str(tmp_path), settings, {"/live/d": str(tmp_path)})
    assert copy.covers == ()
    assert copy.datadir == str(tmp_path)
    assert copy.paths == {"innodb_log_group_home_dir": str(tmp_path)}
    assert copy.log_bin_options == (f"--log-bin={tmp_path}/binlog", f"--log-bin-index={tmp_path}/binlog.index")
    assert (tmp_path / "binlog.index").read_text() == f"{tmp_path}/binlog.000001\n{tmp_path}/binlog.000002\n"
    assert not (tmp_path / "auto.cnf").exists()


@pytest.mark.parametrize(
    ("line", "given", "lacks"),
    [
        (
            "[ERROR] [MY-012657] [InnoDB] Encryption can't find master key, please check the keyring is loaded.",
            True,
            True,
        ),
        (
            "[ERROR] InnoDB: Encrypted page [page id: space=5, page number=3] in file ./s/t.ibd looks corrupted",
            False,
            True,
        ),
        # With the keys at hand it is damage.
        (
            "[ERROR] InnoDB: Encrypted page [page id: space=5, page number=3] in file ./s/t.ibd looks corrupted",
            True,
            False,
        ),
        ("[ERROR] InnoDB: File './shop/t.ibd' is corrupted", False, False),
        # The key file has other keys.
        ("[ERROR] InnoDB: Encryption key is not found for ./m/enc.ibd", True, True),
    ],
)
def test_a_missing_keys_is_told_from_damage(line, given, lacks):
    assert lacks_keys(f"2026-01-02  3:04:06 0 {line}\n", given=given) is lacks


def test_errors_name_the_file_of_a_tablespace(tmp_path):
    (tmp_path / "shop").mkdir()
    for name, number in (("mysql.ibd", 2**32 - 2), ("shop/t.ibd", 5)):
        (tmp_path / name).write_bytes(bytes(34) + number.to_bytes(4, "big") + bytes(100))
    text = "page [page id: space=5, page number=3], [page id: space=55, page number=3], space=4294967294"
    assert name_spaces(text, str(tmp_path)) == (
        "page [page id: space=5 (./shop/t.ibd), page number=3], [page id: space=55, page number=3], "
        "space=4294967294 (./mysql.ibd)"
    )


def test_paths_in_mysqls_dictionary_are_seen_wherever_a_record_begins(tmp_path):
    path = tmp_path / "mysql.ibd"
    records = [
        b"\x01\xd4./shop/near.ibdid=1;",
        b"\0\xd4/far/a.ibdid=2;",
        b"\0//far/b.ibd",
        b"\0/x/far/c.ibu",
        b"\0../up.ibd",
    ]
    path.write_bytes(bytes(1000).join(records) + bytes(10))
    found = dictionary_paths(str(tmp_path))
    assert {"/far/a.ibd", "/far/b.ibd", "/far/c.ibu"} <= found
    assert not any("near" in name or "up" in name for name in found)
    path.write_bytes(b"")
    assert dictionary_paths(str(tmp_path)) == frozenset()
    assert dictionary_paths(str(tmp_path / "missing")) == frozenset()


def test_logs_on_another_volume_are_found_by_their_original_folder_and_the_live_ones_never(tmp_path):
    live, datadir, logs = tmp_path / "live", tmp_path / "1/data", tmp_path / "2/log"
    for folder in (live / "data", live / "log", datadir, logs):
        folder.mkdir(parents=True)
    for folder in (live / "log", logs):
        (folder / "b.index").write_text(f"{live}/log/b.000001\n")
    settings = {"log_bin_basename": "../log/b", "log_bin_index": "../log/b.index"}
    both = {str(live / "data"): str(datadir), str(live / "log"): str(logs)}
    copy = isolate_copy(str(datadir), settings, both, fresh_logs="/run")
    # As the server sees it, which has the copy mounted there.
    assert copy.log_bin_options == (f"--log-bin={live}/log/b", f"--log-bin-index={live}/log/b.index")
    (datadir / "far").symlink_to(live / "data")
    copy = isolate_copy(str(datadir), settings, {str(live / "data"): str(datadir)}, fresh_logs="/run")
    assert copy.covers
    assert copy.log_bin_options == ("--log-bin=/run/b", "--log-bin-index=/run/b.index")


def record(flavor: Literal["mariadb", "mysql"], version: str, **settings: str) -> ServerRecord:
    return ServerRecord(
        flavor=flavor, version=version, server_id=1, server_uuid=None, datadir="/l/d", log_bin=None, settings=settings
    )


def test_a_relocated_server_gets_its_flavors_words_and_never_the_live_logs():
    def moved(path: str) -> str:
        return path.replace("/l/", "/n/") if path.startswith(("/l/d", "/l/t", "/l/both/s")) else path

    mysql = record(
        "mysql",
        "9.7.4",
        innodb_directories="/l/t;/l/far;/l/both;rel",
        log_bin_basename="../log/b",
        log_bin_index="../log/b.index",
        relay_log_basename="relay",
        relay_log_info_file="relay-log.info",
        gtid_mode="ON",
    )
    assert set(relocated_options(mysql, moved, places=("/l/d", "/l/t", "/l/both/s"), absent=("/l/log",))) == {
        "--datadir=/n/d",
        # Never the live tablespaces, but all that is in the copy of them.
        "--innodb-directories=/n/t;/n/both/s;rel",
        "--log-bin=/n/d/b",
        "--log-bin-index=/n/d/b.index",
        "--relay-log=/n/d/relay",
        "--gtid-mode=ON",
        "--skip-replica-start",
    }
    assert "--skip-slave-start" in relocated_options(record("mysql", "8.0.25"), moved)
    assert "--skip-slave-start" in relocated_options(record("mariadb", "11.8.6-MariaDB"), moved)


def test_binary_logs_that_are_not_in_the_copy_are_begun_anew_in_it(tmp_path):
    datadir = tmp_path / "d"
    datadir.mkdir()
    settings = {"log_bin_basename": "../logs/bin", "log_bin_index": "../logs/bin.index"}
    assert isolate_copy(str(datadir), settings, {}).log_bin_options == (
        f"--log-bin={datadir}/bin",
        f"--log-bin-index={datadir}/bin.index",
    )
    assert isolate_copy(str(datadir), {}, {}).log_bin_options == ("--skip-log-bin",)


def test_live_logs_are_not_taken_for_the_copys_because_the_way_to_them_is_the_same(tmp_path):
    copy, logs = tmp_path / "copy", tmp_path / "logs"
    for folder in (copy, logs):
        folder.mkdir()
    (logs / "bin.index").write_text("./bin.000001\n")
    settings = {"log_bin_basename": "../logs/bin", "log_bin_index": "../logs/bin.index"}
    options = isolate_copy(str(copy), settings, {str(tmp_path / "data"): str(copy)}, fresh_logs="/run").log_bin_options
    assert options == ("--log-bin=/run/bin", "--log-bin-index=/run/bin.index")
    assert (logs / "bin.index").read_text() == "./bin.000001\n"


def test_every_absolute_path_is_seen_and_must_be_covered(tmp_path):
    datadir, original = tmp_path / "copy", tmp_path / "live"
    (datadir / "shop").mkdir(parents=True)
    original.mkdir()
    (datadir / "shop" / "m.MYD").symlink_to("/far/m.MYD")
    (datadir / "shop" / "near.MYD").symlink_to("m.MYD")
    (datadir / "shop" / "i.isl").write_text("/far/shop/i.ibd")
    settings = {
        "innodb_page_size": "16384",
        "innodb_data_file_path": "ibdata1:12M;/far/ibdata2:1M",
        "innodb_directories": "/far/x;rel",
    }
    found = absolute_paths(str(datadir), settings)
    assert set(found) == {"/far/m.MYD", "/far/shop/i.ibd", "/far/ibdata2", "/far/x"}
    shown = isolate_copy(str(tmp_path / "live"), {"innodb_directories": "/far/x;rel"}, {str(original): str(original)})
    assert shown.settings["innodb_directories"] == "rel"
    with pytest.raises(MissingRequirementError, match="outside the copy"):
        isolate_copy(str(datadir), settings, {str(original): str(datadir)})
    with pytest.raises(MissingRequirementError, match="that folder does not exist here"):
        isolate_copy(str(datadir), settings, {str(original): str(datadir), "/far": str(tmp_path)})


def test_covers_are_in_an_order_that_hides_nothing_and_the_server_sees_the_original_path(tmp_path):
    datadir, live = tmp_path / "copy", tmp_path / "live"
    for folder in (datadir, live / "d" / "in"):
        folder.mkdir(parents=True)
    (tmp_path / "copy-in").mkdir()
    originals = {str(live / "d" / "in"): str(tmp_path / "copy-in"), str(live / "d"): str(datadir)}
    copy = isolate_copy(str(datadir), {"innodb_undo_directory": "in"}, originals)
    assert [path for _, path in copy.covers] == [str(live / "d"), str(live / "d" / "in")]
    assert copy.datadir == str(live / "d")
    assert copy.paths == {"innodb_undo_directory": str(live / "d" / "in")}


def script(path, text):
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_is_known_by_what_it_prints(tmp_path):
    path = script(tmp_path / "a", "mysqld  Ver 8.4.3 for Linux on x86_64 (MySQL Community Server - GPL)")
    found = find_server("mysql", path)
    assert (found.version, found.number, found.flavor) == ("8.4.3", (8, 4, 3), "mysql")
    with pytest.raises(MissingRequirementError, match="is not a mariadb server"):
        find_server("mariadb", path)
    with pytest.raises(MissingRequirementError, match="prints no version|is not a mysql server"):
        find_server("mysql", script(tmp_path / "b", ""))
    path = script(tmp_path / "c", "mariadbd  Ver 11.8.1-MariaDB-deb13 for debian-linux-gnu on x86_64")
    assert find_server("mariadb", path).number == (11, 8, 1)


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        (0, 16384),
        (0x15, 16384),
        (0x13, 4096),
        (0x17, 65536),
        (3 << 6, 4096),
        (5 << 6, 16384),
        (2 << 6, None),
        (15, 16384),
    ],
)
def test_the_page_size_is_read_from_the_header(tmp_path, flags, size):
    path = tmp_path / "ibdata1"
    path.write_bytes(bytes(54) + flags.to_bytes(4, "big") + bytes(100))
    assert page_size(str(path)) == size
    assert page_size(str(tmp_path / "missing")) is None


def test_damage_is_told_from_other_errors_and_notes():
    log = (
        "2026-01-02  3:04:06 5 [ERROR] InnoDB: File './shop/t.ibd' is corrupted\n"
        "2026-01-02  3:04:07 5 [ERROR] InnoDB: File './shop/t.ibd' is corrupted\n"
        "2026-01-02  3:04:07 5 [Note] InnoDB: corrupted page dump 4141\n"
        "2026-01-02  3:04:07 5 [Warning] InnoDB: Trying to recover corrupted page from the doublewrite buffer\n"
        "2026-01-02  3:04:07 5 [ERROR] Could not open mysql.plugin table\n"
    )
    assert damage(log) == ("[ERROR] InnoDB: File './shop/t.ibd' is corrupted",)


def test_a_server_whose_starter_is_dead_already_does_not_start():
    # It was killed between the fork and PR_SET_PDEATHSIG: no signal will come.
    argv = [*_as_owner(os.getuid(), os.getgid()), "echo", "started"]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout == "started\n"
    by_another = subprocess.run(["sh", "-c", f"{shlex.join(argv)}; :"], check=True, capture_output=True, text=True)
    assert by_another.stdout == ""
