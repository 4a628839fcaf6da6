"""A restore that is ended, killed, or finds no room: nothing is left, or the next one clears up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import StorageError
from snapmgr.restore import copy as restore_copy
from snapmgr.restore.run import RestoreDiffersError, restore
from snapmgr.restore.unfinished import unfinished_restores
from snapmgr.system.kernel import rename_new
from snapmgr.testing import trees
from snapmgr.tree import hiddenfolder
from support.restored import LARGE_BYTES, require_nothing_left
from support.storage import loop_filesystem

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "ext4")


@contextmanager
def _caught_copying(scene, dest):
    """Start a restore and stop the process in the middle of its copying."""
    process = scene.start("restore", "latest", str(dest))
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            with suppress(OSError, StopIteration):
                begun = next(dest.glob(".snapmgr-restore-*/tree/z"))
                if begun.stat().st_blocks:
                    break
        os.kill(process.pid, signal.SIGSTOP)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("existed", [True, False])
def test_sigterm_leaves_nothing(large, other, existed):
    dest = other.point / "ended"
    if existed:
        dest.mkdir()
    with _caught_copying(large, dest) as process:
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert dest.exists() == existed
    if existed:
        assert os.listdir(dest) == []
        dest.rmdir()
    require_nothing_left(large)


def test_after_sigkill_the_next_one_clears_up_and_restores(large, other):
    dest = other.point / "killed"
    with _caught_copying(large, dest) as process:
        process.kill()
        process.communicate()
    assert len(os.listdir(dest)) == 1
    assert len(Catalog(large.state).leases()[0]) == 1
    done = large.run("restore", "latest", str(dest))
    assert done.returncode == 0, done.stderr
    trees.same(trees.fingerprint(large.data), trees.fingerprint(dest))
    require_nothing_left(large)
    subprocess.run(["rm", "-r", dest], check=True)


def test_killed_while_it_moves_all_up_the_next_one_finishes_and_reports_the_same(files):
    dest = Path(files.file_system.point) / "almost"
    child = os.fork()
    if child == 0:
        calls = iter(range(5))

        def die(*arguments):
            if next(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            rename_new(*arguments)

        hiddenfolder.rename_new = die
        ctx = files.context()
        restore(ctx, ctx.catalog.resolve("latest"), str(dest))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(os.listdir(dest)) == 5
    done = files.run("restore", "latest", str(dest), "--json")
    assert done.returncode == 0, done.stderr
    assert "complete except for its last step, which is done now" in done.stderr
    assert json.loads(done.stdout)["restored"]["shared_files"] > 10
    trees.same(trees.fingerprint(files.data), trees.fingerprint(dest))
    require_nothing_left(files)


def test_leftovers_are_named_and_removed_and_nothing_else(large, other):
    dest = other.point / "left"
    with _caught_copying(large, dest) as process:
        ctx = large.context()
        (active,) = unfinished_restores(ctx)
        assert active.active
        assert "still active" in active.resolve()
        assert len(list(dest.iterdir())) == 1
        process.kill()
        process.communicate()
    (dest / "somebody's").touch()
    (leftover,) = unfinished_restores(ctx)
    assert not leftover.active
    assert str(dest) in leftover.what
    assert "are removed" in leftover.resolve()
    assert os.listdir(dest) == ["somebody's"]
    assert unfinished_restores(ctx) == ()
    assert "are removed" in leftover.resolve()
    (dest / "somebody's").unlink()
    dest.rmdir()
    # The mount that the killed one had is removed by the next restore of the snapshot.
    assert large.run("restore", "latest", str(dest), "--no-check").returncode == 0
    require_nothing_left(large)
    subprocess.run(["rm", "-r", dest], check=True)


def test_two_restores_to_one_folder(large, other):
    dest = other.point / "both"
    with _caught_copying(large, dest) as process:
        second = large.run("restore", "latest", str(dest))
        assert second.returncode == 3
        assert "another restore to" in second.stderr
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    trees.same(trees.fingerprint(large.data), trees.fingerprint(dest))
    require_nothing_left(large)
    again = large.run("restore", "latest", str(dest))
    assert again.returncode == 2
    assert "is not empty" in again.stderr
    subprocess.run(["rm", "-r", dest], check=True)


def test_a_copy_of_a_half_made_tree_is_not_ours(large, other):
    dest = other.point / "half"
    with _caught_copying(large, dest) as process:
        process.kill()
        process.communicate()
    theirs = other.point / "theirs"
    subprocess.run(["cp", "-a", dest, theirs], check=True)
    before = trees.fingerprint(theirs)
    done = large.run("restore", "latest", str(theirs))
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    trees.same(before, trees.fingerprint(theirs))
    (leftover,) = unfinished_restores(large.context())
    leftover.resolve()
    assert not dest.exists()
    subprocess.run(["rm", "-r", theirs], check=True)


def test_what_does_not_fit_is_not_begun(large):
    with loop_filesystem("ext4", 64 << 20, base=Path("/dev/shm")) as small:
        done = large.run("restore", "latest", str(small.point / "x"))
        assert done.returncode == 1
        assert "the copy needs about 16" in done.stderr
        assert os.listdir(small.point) == ["lost+found"]
    require_nothing_left(large)


def test_a_disk_that_fills_up_in_the_middle(large, monkeypatch):
    class Plenty:
        f_blocks = f_bfree = f_bavail = f_files = f_favail = 1 << 40
        f_frsize = 4096

    with loop_filesystem("ext4", 64 << 20, base=Path("/dev/shm")) as small:
        monkeypatch.setattr(restore_copy.os, "fstatvfs", lambda _fd: Plenty)
        ctx = large.context()
        with pytest.raises(StorageError, match="no space left for z") as caught:
            restore(ctx, ctx.catalog.resolve("latest"), str(small.point / "x"))
        assert "make room" in (caught.value.hint or "")
        monkeypatch.undo()
        assert os.listdir(small.point) == ["lost+found"]
    require_nothing_left(large)


def test_a_disk_that_writes_something_else_is_found_out(large, other, monkeypatch):
    synced = restore_copy.sync_file_system

    def corrupt(fd):
        synced(fd)
        (hidden,) = [name for name in os.listdir(fd) if name.startswith(".snapmgr-restore-")]
        path = f"/proc/self/fd/{fd}/{hidden}/tree/z"
        info = os.stat(path)
        with open(path, "r+b") as file:
            file.seek(LARGE_BYTES // 2)
            byte = file.read(1)[0]
            file.seek(LARGE_BYTES // 2)
            file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        monkeypatch.undo()

    monkeypatch.setattr(restore_copy, "sync_file_system", corrupt)
    ctx = large.context()
    dest = other.point / "damaged"
    with pytest.raises(RestoreDiffersError, match="z has other contents") as caught:
        restore(ctx, ctx.catalog.resolve("latest"), str(dest))
    assert caught.value.exit_code == 6
    assert "z has other contents" in (dest / restore_copy.DIFFERS_FILE).read_text()
    assert (dest / "a").read_text() == "first"
    require_nothing_left(large)
    subprocess.run(["rm", "-r", dest], check=True)
