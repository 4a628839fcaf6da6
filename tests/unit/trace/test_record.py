"""The recorder on a made-up mount: a FIFO for the log, as a client of the Cloud service has it, and files beside it."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from snapmgr.contract.errors import ConfigError, MissingRequirementError, NotFoundError, SnapmgrError
from snapmgr.trace.analysis import analyse
from snapmgr.trace.mounted import find_mount
from snapmgr.trace.reading import read_trace
from snapmgr.trace.record import _folder, _prepares, record

LINE = b"2022.09.23 14:10:02.150000 [uid:0,gid:0,pid:31098] write (3861,4096,0,18333): OK <0.000040>\n"


@pytest.fixture
def point(tmp_path, monkeypatch):
    """A folder that looks like a mount of a client before 4.7, without counters."""
    point = tmp_path / "mnt"
    point.mkdir()
    (point / ".config").write_text(json.dumps({"name": "cloudy", "secret": "hidden"}))
    os.mkfifo(point / ".oplog")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == point)
    # Any other device than the file's: it may not be recorded onto itself.
    monkeypatch.setattr("snapmgr.trace.record._device", lambda path: 1 if path == point else 2)
    return point


@contextmanager
def logging(point, *blocks):
    """Write blocks into the log, and keep it open until the context ends."""
    done = threading.Event()

    def write():
        # The recorder may have enough before all is written.
        with suppress(BrokenPipeError), open(point / ".oplog", "wb", buffering=0) as out:
            out.writelines(blocks)
            done.wait(30)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield done
    finally:
        done.set()
        writer.join()


def test_an_oplog_without_counters_is_recorded_too(point, tmp_path):
    path = tmp_path / "log.gz"
    with logging(point, LINE * 1000 + b"#\n", LINE[:50], LINE[50:] * 1 + LINE[:20]) as done:
        # It ends when the client closes the log.
        threading.Timer(0.2, done.set).start()
        ended = record(find_mount(point), path, limit_bytes=1 << 20)
    assert ended.stopped_by == "mount"
    trace = read_trace(str(path))
    assert (trace.truncated, trace.operations.skipped) == (None, 0)
    # What is in the making at the end is no line.
    assert len(trace.operations) == 1001
    # The mark of an idle second is kept: it tells idle time from missing lines.
    assert trace.idle == {1000: 1}
    assert trace.header["volume"] == "mnt"
    assert "hidden" not in json.dumps(trace.header)
    assert analyse(trace).missing is None


def test_the_size_is_bounded(point, tmp_path):
    path = tmp_path / "log.gz"
    noise = b"".join(LINE.replace(b"3861", b"%d" % (number * 7919 % 10**9)) for number in range(30_000))
    with logging(point, noise, *[LINE] * 5) as done:
        threading.Timer(1.0, done.set).start()
        ended = record(find_mount(point), path, limit_bytes=5000)
    assert ended.stopped_by in {"size", "mount"}
    assert path.stat().st_size == ended.size_bytes
    assert read_trace(str(path)).trailer["stopped_by"] == ended.stopped_by


def test_a_full_disk_is_said(point, tmp_path, monkeypatch):
    real = os.write

    def write(fd, data):
        # The header finds room.
        if threading.current_thread().name == "trace":
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr("snapmgr.trace.record.os.write", write)
    noise = b"".join(LINE.replace(b"3861", b"%d" % (number * 7919 % 10**9)) for number in range(60_000))
    with logging(point, noise), pytest.raises(SnapmgrError, match="cannot write .*log.gz: No space left on device"):
        record(find_mount(point), tmp_path / "log.gz", limit_bytes=1 << 30)


def test_what_is_refused(point, tmp_path, monkeypatch):
    with pytest.raises(NotFoundError):
        find_mount(tmp_path / "none")
    path = tmp_path / "log.gz"
    with logging(point):
        path.write_bytes(b"precious")
        with pytest.raises(ConfigError, match="exists already"):
            record(find_mount(point), path, limit_bytes=1)
        assert path.read_bytes() == b"precious"
    with logging(point) as done:
        threading.Timer(0.2, done.set).start()
        with pytest.raises(MissingRequirementError, match="there is no program nowhere"):
            record(find_mount(point), tmp_path / "new.gz", limit_bytes=1, command=["nowhere"])
    assert not (tmp_path / "new.gz").exists()
    monkeypatch.setattr("snapmgr.trace.record._device", lambda _: 1)
    with logging(point), pytest.raises(ConfigError, match="would record itself"):
        record(find_mount(point), tmp_path / "new.gz", limit_bytes=1)
    (point / ".config").write_text("no JSON")
    with pytest.raises(SnapmgrError, match="cannot be parsed"):
        find_mount(point)


@pytest.mark.parametrize(
    ("command", "prepares", "folder"),
    [
        (["/usr/bin/mariadb-backup", "--prepare", "--target-dir={point}/full"], True, "{point}/full"),
        (["mariadb-backup", "--backup", "--password=secret", "--target-dir", "{point}/full"], False, "{point}/full"),
        (["snapmgr", "prepare", "{point}/full"], True, "{point}/full"),
        (["cat", "/etc", "{point}/none"], False, None),
        ([], False, None),
    ],
)
def test_of_a_command_the_header_has_its_kind_and_its_folder(tmp_path, command, prepares, folder):
    (tmp_path / "full").mkdir()
    words = [word.format(point=tmp_path) for word in command]
    assert _prepares(words) is prepares
    assert _folder(words, tmp_path) == (folder and folder.format(point=tmp_path))
