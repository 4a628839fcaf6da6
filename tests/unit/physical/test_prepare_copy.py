"""Copies to scratch and changes written back: equal, with holes, whatever the files; failures end all threads."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time

import pytest

from snapmgr.contract.errors import StorageError
from snapmgr.physical.crew import Crew, Piece, pieces
from snapmgr.physical.prepare import scratchcopy
from snapmgr.physical.prepare.scratchcopy import BLOCK_BYTES, copy_to_scratch
from snapmgr.physical.prepare.writeback import write_back

SIZES = (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 17, (2 << 20) + 3, (3 << 20) + 5)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr("snapmgr.physical.crew._PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(scratchcopy, "_STEP_BYTES", 2 * BLOCK_BYTES)


def _tree(folder, seed=1):
    chance = random.Random(seed)
    folder.mkdir()
    (folder / "db").mkdir(mode=0o750)
    (folder / "db" / "empty").mkdir()
    for number, size in enumerate(SIZES):
        path = folder / ("db" if number % 2 else ".") / f"t{number}.ibd"
        path.write_bytes(chance.randbytes(size))
        path.chmod(0o640)
        os.utime(path, ns=(1_000_000_000, 2_000_000_000 + number))
    with (folder / "sparse.ibd").open("wb") as file:
        file.truncate(8 << 20)
        file.seek(5 << 20)
        file.write(b"x" * 70_000)
    (folder / "zeroes.ibd").write_bytes(bytes(3 << 20))
    (folder / "aim").symlink_to("db/t1.ibd")
    return folder


def _contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def test_the_copy_is_equal_and_keeps_holes(tmp_path):
    source = _tree(tmp_path / "source")
    seen = []
    found = copy_to_scratch(
        str(source), str(tmp_path / "copy"), digests=True, progress=lambda done, total: seen.append((done, total))
    )
    assert _contents(tmp_path / "copy") == _contents(source)
    assert found.size_bytes == sum(len(data) for data in _contents(source).values() if data) == seen[-1][0]
    for path in source.rglob("*"):
        one, other = path.lstat(), (tmp_path / "copy" / path.relative_to(source)).lstat()
        assert (one.st_mode, one.st_uid, one.st_mtime_ns) == (other.st_mode, other.st_uid, other.st_mtime_ns), path
    assert (tmp_path / "copy" / "sparse.ibd").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "copy" / "zeroes.ibd").stat().st_blocks * 512 < 1 << 20


def test_digests_are_those_of_the_contents(tmp_path):
    source = _tree(tmp_path / "source")
    found = copy_to_scratch(str(source), str(tmp_path / "copy"), digests=True)
    for path, size in found.sizes.items():
        data = (source / path).read_bytes()
        wanted = b"".join(scratchcopy.digest(data[at : at + BLOCK_BYTES]) for at in range(0, size, BLOCK_BYTES))
        assert bytes(found.digests[path]) == wanted, path


def _change(folder, seed):
    """Change a prepared tree as a tool does: pages, sizes, files that come and go."""
    chance = random.Random(seed)
    files = sorted(path for path in folder.rglob("*.ibd"))
    for path in chance.sample(files, 5):
        size = path.stat().st_size
        what = chance.choice(["page", "page", "grow", "shrink", "zero"])
        with path.open("r+b") as file:
            if what == "page" and size:
                for _ in range(3):
                    file.seek(chance.randrange(size))
                    file.write(chance.randbytes(100))
            elif what == "grow":
                file.seek(size + chance.randrange(3 * BLOCK_BYTES))
                file.write(b"grown")
            elif what == "shrink":
                file.truncate(size // 2)
            elif what == "zero":
                file.write(bytes(min(size, 2 * BLOCK_BYTES)))
    shutil.rmtree(folder / "db" / "empty")
    (folder / "t0.ibd").unlink()
    (folder / "new").mkdir()
    (folder / "new" / "ib_logfile0").write_bytes(chance.randbytes(300_000))
    (folder / "new" / "nothing").touch()
    (folder / "aim").unlink()
    (folder / "lead").symlink_to("new")


@pytest.mark.parametrize("seed", range(5))
def test_changes_are_written_back_and_nothing_else(tmp_path, seed):
    source = _tree(tmp_path / "source", seed)
    scratch, clone = tmp_path / "scratch", tmp_path / "clone"
    before = copy_to_scratch(str(source), str(scratch), digests=True)
    shutil.copytree(source, clone, symlinks=True)
    _change(scratch, seed)
    written = write_back(str(scratch), str(clone), before)
    assert _contents(clone) == _contents(scratch)
    assert written.removed_files == 2
    assert written.new_files == 2
    assert 300_000 <= written.changed_bytes < before.size_bytes // 2
    again = copy_to_scratch(str(scratch), str(tmp_path / "more"), digests=True)
    idle = write_back(str(scratch), str(clone), again)
    assert idle.changed_bytes == idle.changed_files == 0


def test_lost_writes_are_found(tmp_path, monkeypatch):
    source = _tree(tmp_path / "source")
    scratch, clone = tmp_path / "scratch", tmp_path / "clone"
    before = copy_to_scratch(str(source), str(scratch), digests=True)
    shutil.copytree(source, clone, symlinks=True)
    with (scratch / "t6.ibd").open("r+b") as file:
        file.write(b"changed")
    monkeypatch.setattr("snapmgr.physical.prepare.writeback.write_all", lambda *_: None)
    with pytest.raises(StorageError, match=r"t6\.ibd in the storage differs from the data written"):
        write_back(str(scratch), str(clone), before)


def test_a_full_scratch_is_named(tmp_path, monkeypatch):
    source = _tree(tmp_path / "source")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scratchcopy, "write_all", full)
    with pytest.raises(StorageError, match="no space left for"):
        copy_to_scratch(str(source), str(tmp_path / "copy"))
    assert not [thread for thread in threading.enumerate() if thread.name == "copy"]


def test_a_file_that_shrinks_is_named(tmp_path, monkeypatch):
    source = _tree(tmp_path / "source")
    made = scratchcopy._outline

    def shrinking(*arguments):
        found = made(*arguments)
        with (source / "t6.ibd").open("r+b") as file:
            file.truncate(100)
        return found

    monkeypatch.setattr(scratchcopy, "_outline", shrinking)
    with pytest.raises(StorageError, match=r"t6\.ibd changed while it was copied"):
        copy_to_scratch(str(source), str(tmp_path / "copy"), digests=True)


def test_what_no_tool_makes_is_refused(tmp_path):
    source = _tree(tmp_path / "source")
    os.mkfifo(source / "pipe")
    with pytest.raises(StorageError, match="pipe is not a file"):
        copy_to_scratch(str(source), str(tmp_path / "copy"))


def test_the_first_failure_ends_all():
    begun = []

    def act(piece):
        begun.append(piece)
        if piece.offset == 3:
            raise ValueError(piece.path)

    with pytest.raises(ValueError, match="three"):
        Crew(1).work([Piece("three" if number == 3 else "x", number, 1) for number in range(100)], act)
    assert len(begun) == 4


def test_a_long_piece_ends_early_when_another_one_fails():
    crew = Crew(2)
    counted = []

    def act(piece):
        if piece.path == "bad":
            raise ValueError(piece.path)
        while True:
            counted.append(1)
            crew.count(1)
            time.sleep(0.001)

    with pytest.raises(ValueError, match="bad"):
        crew.work([Piece("long", 0, 1), Piece("bad", 0, 1)], act)
    assert counted


def test_pieces_cover_every_byte_once():
    sizes = {"a": 0, "b": 1, "c": (3 << 20) + 9, "d": 1 << 20}
    found = pieces(sizes)
    assert found[0].path == "c"
    for path, size in sizes.items():
        mine = sorted((one.offset, one.length) for one in found if one.path == path)
        assert sum(length for _, length in mine) == size
        assert [offset for offset, _ in mine] == [sum(length for _, length in mine[:at]) for at in range(len(mine))]
