"""What a server's user may have laid in its datadir: symlinks, FIFOs, odd contents where root looks and writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.mysql.datadir.copy import absolute_paths, isolate_copy
from snapmgr.mysql.datadir.layout import read_files
from snapmgr.mysql.datadir.plainfile import open_plain, read_isl


@pytest.fixture
def datadir(tmp_path: Path) -> Path:
    (tmp_path / "data" / "db").mkdir(parents=True)
    return tmp_path / "data"


@pytest.mark.parametrize("target", ["../victim", "/nowhere", "db", "."])
def test_an_index_that_is_a_symlink_is_not_written_through(datadir: Path, target: str) -> None:
    victim = datadir.parent / "victim"
    victim.write_text("root:x:0:0\n./other/line\n")
    (datadir / "binlog.index").symlink_to(target)
    with pytest.raises(MissingRequirementError, match="regular file|outside"):
        isolate_copy(str(datadir), {"log_bin_basename": "binlog"}, {})
    assert victim.read_text() == "root:x:0:0\n./other/line\n"


def test_an_index_that_is_a_fifo_is_not_waited_for(datadir: Path) -> None:
    os.mkfifo(datadir / "binlog.index")
    with pytest.raises(MissingRequirementError, match="not a regular file"):
        isolate_copy(str(datadir), {"log_bin_basename": "binlog"}, {})


def test_a_system_tablespace_that_is_none_has_no_page_size(datadir: Path) -> None:
    os.mkfifo(datadir / "ibdata1")
    assert "innodb_page_size" not in isolate_copy(str(datadir), {}, {}).settings


@pytest.mark.parametrize("content", [b"", b"\0", b"\0/x", b"\xff\xfe", b"/a" * 100_000, b"\n\n"])
def test_an_isl_file_of_any_content(datadir: Path, content: bytes) -> None:
    (datadir / "db" / "t.isl").write_bytes(content)
    read_files(str(datadir))
    absolute_paths(str(datadir), {})


def test_an_isl_file_that_is_none(datadir: Path) -> None:
    os.mkfifo(datadir / "db" / "fifo.isl")
    (datadir / "db" / "folder.isl").mkdir()
    read_files(str(datadir))
    assert absolute_paths(str(datadir), {}) == {}
    assert read_isl(str(datadir / "db" / "fifo.isl")) == ""
    assert read_isl(str(datadir / "db" / "gone.isl")) == ""


def test_plain_files_are_opened_for_writing_without_truncating_them(datadir: Path) -> None:
    path = datadir / "file"
    path.write_bytes(b"content")
    with open_plain(str(path), write=True) as file:
        file.write(b"C")
    assert path.read_bytes() == b"Content"
    (datadir / "link").symlink_to("file")
    for name in ("link", ".", "gone"):
        with pytest.raises(FileNotFoundError):
            open_plain(str(datadir / name))
