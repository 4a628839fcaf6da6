"""What the JuiceFS backend decides, without any volume."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.api import Mount, NotMine, StorageError, Target
from snapmgr.system.paths import mounted_inside
from snapmgr_juicefs import JuicefsConfig, leftovers, locating, program, tree
from snapmgr_juicefs.client import Client, own_mount, sessions, translate, wait_uploaded

_NOW = 1_800_000_000.0
_HOUR = 3600.0


def _mount(number: int, point: str, *, device: str = "0:50", root: str = "/", fs_type: str = "fuse.juicefs") -> Mount:
    source = "JuiceFS:vol"
    return Mount(id=number, parent_id=1, device=device, root=root, point=point, fs_type=fs_type, source=source)


def _client(**changes) -> Client:
    facts = {
        "mount": _mount(1, "/jfs"),
        "name": "vol",
        "uuid": "u",
        "subdir": "",
        "pid": 0,
        "read_only": False,
        "writeback": False,
        "cache_dirs": (),
        "capacity_bytes": 0,
        "trash_days": 0,
        "dumps_every_s": 0.0,
        "storage": "file",
        "block_bytes": 4 << 20,
        "version": "1.4.2",
    }
    return Client(**(facts | changes))


@pytest.mark.parametrize(
    ("url", "bare", "password"),
    [
        ("redis://127.0.0.1:6379/1", "redis://127.0.0.1:6379/1", ""),
        ("redis://:secret@127.0.0.1/1", "redis://127.0.0.1/1", "secret"),
        ("redis://:****@127.0.0.1/1", "redis://127.0.0.1/1", ""),
        ("redis://user:p:w@d@host/1", "redis://user:@host/1", "p:w@d"),
        ("mysql://jfs:secret@(127.0.0.1:3306)/db", "mysql://jfs:@(127.0.0.1:3306)/db", "secret"),
        ("sqlite3:///srv/meta.db", "sqlite3:///srv/meta.db", ""),
        ("", "", ""),
    ],
)
def test_address_without_its_password(url: str, bare: str, password: str) -> None:
    assert program.parse_address(url) == (bare, password)


@given(password=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=4))
def test_no_password_stays_in_an_address(password: str) -> None:
    bare, found = program.parse_address(f"mysql://user:{password}@(host)/db")
    assert bare == "mysql://user:@(host)/db"
    assert found == ("" if set(password) <= {"*"} else password)


def test_address_shows_no_secret() -> None:
    assert "hidden" not in repr(program.Address(url="redis://h/1", environment={"META_PASSWORD": "hidden"}))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("juicefs\0mount\0-d\0redis://h/1\0/jfs", "redis://h/1"),
        ("/x/juicefs --no-agent mount --bucket http://s3/b redis://:****@h/1 /jfs", "redis://:****@h/1"),
        ("juicefs mount redis://h/1 /jfs --cache-dir /c -d", "redis://h/1"),
        ("juicefs mount --a-long-option x redis://h/1 /j", "redis://h/1"),  # cut off by the client
        ("juicefs mount --a-long-option x redis://h/", None),
        ("juicefs mount redis://h/1 /other", None),
        ("juicefs gateway redis://h/1 127.0.0.1:9000", None),
        ("cat mount redis", None),
    ],
)
def test_address_of_a_running_client(line: str, found: str | None, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(line.encode() + b"\0\0  \0")
    (tmp_path / "7" / "cwd").symlink_to("/")
    monkeypatch.setattr(program, "_PROC", str(tmp_path))
    assert program.running_address(_client(pid=7)) == found


def test_relative_database_is_in_the_clients_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"juicefs mount sqlite3://meta.db jfs")
    (tmp_path / "7" / "cwd").symlink_to("/")
    monkeypatch.setattr(program, "_PROC", str(tmp_path))
    assert program.running_address(_client(pid=7)) == "sqlite3:///meta.db"


def test_complaints_are_shown_without_time_and_place() -> None:
    said = "2026/11/21 23:47:58.78 juicefs[3] <INFO>: Meta [x@y.go:1]\n\x1b[31m2026/11/21 23:47 juicefs[3] <FATAL>: "
    assert program.complaint(said + "clone: file exists [main@main.go:31]\x1b[0m\n") == "clone: file exists"
    assert program.complaint("something else\n") == "something else"


def test_quotas() -> None:
    table = """
+---------+-----------+---------+------+-----------+-------+-------+
| Path/ID |    Size   |   Used  | Use% |   Inodes  | IUsed | IUse% |
+---------+-----------+---------+------+-----------+-------+-------+
| /store  |   1.0 GiB | 8.0 MiB |   0% |     5,000 |    31 |    0% |
| /a b    | unlimited |     0 B |      | unlimited |     0 |       |
| /over   |   1.0 KiB | 2.0 KiB | 200% | unchanged |     9 |       |
| uid:7   |   1.0 GiB |     0 B |   0% |       100 |     0 |    0% |
+---------+-----------+---------+------+-----------+-------+-------+
"""
    found = [(quota.path, quota.free_bytes, quota.free_inodes) for quota in program.parse_quotas(table)]
    assert found == [("/store", (1 << 30) - (8 << 20), 4969), ("/a b", None, None), ("/over", 0, None)]
    assert program.parse_quotas("nothing | of | that") == []


def test_clone_never_goes_into_a_folder() -> None:
    assert program.clone_arguments("/jfs/a/", "/jfs/b//") == ("clone", "--preserve", "/jfs/a", "/jfs/b")


def test_sessions() -> None:
    assert [one["HostName"] for one in sessions('warning\n{"Sessions": [{"HostName": "h"}]}')] == ["h"]
    assert sessions('{"Sessions": null}') == []
    with pytest.raises(StorageError):
        sessions("nothing")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_password_file_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("secret\nnot this")
    path.chmod(0o600)
    assert program.read_password(str(path)) == "secret"
    path.chmod(mode)
    with pytest.raises(StorageError, match="others may read") as caught:
        program.read_password(str(path))
    assert "secret" not in str(caught.value)
    with pytest.raises(StorageError):
        program.read_password(str(tmp_path / "absent"))


def test_warning_of_dumps(tmp_path: Path) -> None:
    def said(config: JuicefsConfig, **changes) -> str:
        return locating.dumps_warning(_client(**changes), config, _NOW) or ""

    assert "one metadata engine" in said(JuicefsConfig())
    assert said(JuicefsConfig(), dumps_every_s=_HOUR) == ""
    assert "one metadata engine" in said(JuicefsConfig(), dumps_every_s=48 * _HOUR)
    seen = JuicefsConfig(metadata_dumps=str(tmp_path), metadata_dumps_max_age_hours=2.0)
    assert "holds no dump" in said(seen, dumps_every_s=_HOUR), "what is configured is looked at"
    dump = tmp_path / "dump.json.gz"
    dump.write_bytes(b"")
    os.utime(dump, (_NOW, _NOW))
    assert "holds no dump" in said(seen), "an empty file is none"
    dump.write_bytes(b"x")
    os.utime(dump, (_NOW - _HOUR, _NOW - _HOUR))
    assert said(seen) == ""
    os.utime(dump, (_NOW - 3 * _HOUR, _NOW - 3 * _HOUR))
    assert "is 3 h old" in said(seen)
    assert "cannot be seen" in said(JuicefsConfig(metadata_dumps=str(tmp_path / "absent")))


class _Silent:
    """A client program whose metadata engine does not answer."""

    def status(self, address: program.Address) -> str:
        raise StorageError(f"juicefs status {address.url} did not finish")


def test_a_metadata_engine_that_cannot_be_asked_is_told() -> None:
    def said(config: JuicefsConfig) -> str:
        return "\n".join(locating.warnings(_client(dumps_every_s=_HOUR), config, _Silent(), _NOW))

    assert "cannot be asked for quotas" in said(JuicefsConfig(meta_url="redis://127.0.0.1:1/1"))
    refused = said(JuicefsConfig(meta_url="redis://:geheim@127.0.0.1:1/1"))
    assert "has a password in it (leave it out" in refused
    assert "geheim" not in refused
    assert said(JuicefsConfig(meta_url="redis://127.0.0.1:1/1", ask_metadata=False)) == ""


def test_paths_in_the_volume() -> None:
    whole, part = _client(), _client(subdir="/db/backups")
    assert whole.inside("/jfs/a/b") == "/a/b"
    assert part.inside("/jfs/a") == "/db/backups/a"
    assert part.inside("/jfs") == "/db/backups"
    assert part.outside("/db/backups/a") == "/jfs/a"
    assert part.outside("/db/backups2") is None
    assert whole.outside("/a") == "/jfs/a"


def test_bind_mount_leads_to_the_clients_own() -> None:
    own = _mount(1, "/jfs")
    bound = _mount(2, "/var/lib/mysql", root="/db")
    other = _mount(3, "/other", device="0:51")
    table = (_mount(0, "/", device="8:1", fs_type="ext4"), own, bound, other)
    assert own_mount("/var/lib/mysql/x", table) == own
    assert translate("/var/lib/mysql/x", table, own) == "/jfs/db/x"
    assert translate("/jfs/x", table, own) == "/jfs/x"
    assert own_mount("/etc", table) is None
    assert mounted_inside("/jfs/elsewhere", table) is None
    assert mounted_inside("/jfs/db", table) == "/var/lib/mysql"


@pytest.mark.parametrize(
    ("path", "store"),
    [("/jfs", "s"), ("/jfs/s/in", "s"), ("/jfs/a", "a/s"), ("/jfs/a", "/s"), ("/jfs/a", "../s"), ("/jfs/a", ".")],
)
def test_stores_that_will_not_do(path: str, store: str, monkeypatch) -> None:
    mount = _mount(1, "/jfs")
    monkeypatch.setattr(locating.clients, "recognise", lambda _: _client())
    monkeypatch.setattr(locating.os, "stat", lambda _: os.stat_result((0, 5, *[0] * 8)))
    found = locating.locate(Target(path=path, mount=mount), (mount,), JuicefsConfig(store=store), "juicefs")
    assert isinstance(found, NotMine)


def test_leftovers(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert leftovers.read(fd) == []
        leftovers.note(fd, _NOW)
        leftovers.note(fd, _NOW + 20 * _HOUR)
        times = leftovers.read(fd)
        assert not leftovers.is_due(times, _NOW + 24 * _HOUR)
        assert "can remove it in 10 min" in (leftovers.warning(times, _NOW + 24 * _HOUR) or "")
        assert leftovers.is_due(times, _NOW + 25 * _HOUR)
        leftovers.forget_due(fd, _NOW + 25 * _HOUR)
        assert leftovers.read(fd) == [_NOW + 20 * _HOUR]
        assert leftovers.warning((), _NOW) is None
    finally:
        os.close(fd)


@contextmanager
def _opened(folder: Path):
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_clone_is_completed_and_compared(tmp_path: Path) -> None:
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    for folder in (origin, clone):
        (folder / "sub").mkdir(parents=True)
        (folder / "file").write_bytes(bytes(5000))
    os.link(origin / "file", origin / "sub" / "again")
    (clone / "sub" / "again").write_bytes(bytes(5000))
    os.mkfifo(origin / "fifo", 0o640)
    os.utime(clone / "sub", ns=(1, 1))
    with _opened(origin) as fd:
        seen = tree.flush(fd, "origin")
    assert (seen.files, seen.folders, seen.counted_bytes) == (3, 2, 4096 * (2 + 2 + 1 + 2))
    with _opened(clone) as fd:
        tree.complete(fd, seen, "origin")
        assert (clone / "file").samefile(clone / "sub" / "again")
        assert (clone / "fifo").is_fifo()
        assert (clone / "fifo").stat().st_mode & 0o777 == 0o640
        assert (clone / "sub").stat().st_mtime_ns == 1
        (clone / "sub" / "again").unlink()
        (clone / "file").unlink()
        (clone / "file").touch()
        (clone / "more").touch()
        with pytest.raises(StorageError, match="has 4 entries in its top, the original had 3"):
            tree.complete(fd, tree.Flushed(counts=seen.counts), "origin")


def test_waiting_for_uploads_ends_when_the_client_does(tmp_path):
    staged = tmp_path / "cache" / "rawstaging"
    staged.mkdir(parents=True)
    (staged / "block").write_bytes(b"x" * 100)
    process = subprocess.Popen(["sleep", "60"])
    gone = threading.Timer(0.3, lambda: (process.kill(), process.wait()))
    gone.start()
    start = time.monotonic()
    with pytest.raises(StorageError, match="is gone, and 100 B are still only in its cache"):
        wait_uploaded(_client(pid=process.pid, cache_dirs=(str(tmp_path / "cache"),)), 20.0)
    assert time.monotonic() - start < 10
    gone.join()
