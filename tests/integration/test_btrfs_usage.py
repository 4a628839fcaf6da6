"""btrfs: what a snapshot costs, against what the btrfs programs say."""

from __future__ import annotations

import os
import subprocess

import pytest

from support.btrfs import btrfs_disk, make_backend, make_subvolume, run, take

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
BACKEND = make_backend()
MIB = 1 << 20


@pytest.fixture(name="disk")
def _disk():
    with btrfs_disk(500) as disk:
        yield disk


def _du(path):
    """Return the exclusive bytes by FIEMAP, as btrfs-progs counts them."""
    return int(run("btrfs", "filesystem", "du", "--raw", "-s", path).splitlines()[1].split()[1])


def _exact(ref):
    return BACKEND.usage(ref, exact=True).exclusive_bytes


def _write(path, size, *, at=0, flags=os.O_WRONLY | os.O_CREAT):
    fd = os.open(path, flags)
    os.pwrite(fd, os.urandom(size), at)
    os.fsync(fd)
    os.close(fd)


def test_without_quotas_the_cheap_answer_is_unknown(disk):
    ref = take(BACKEND, make_subvolume(disk.point / "db", file="x"), "s1")
    usage = BACKEND.usage(ref)
    assert (usage.exclusive_bytes, usage.valid) == (None, True)


def test_exact_usage_grows_as_the_origin_is_overwritten_and_agrees_with_btrfs_du(disk):
    db = make_subvolume(disk.point / "db")
    for number in range(64):
        _write(db / f"t{number}", 256 * 1024)
    ref = take(BACKEND, db, "s1")
    copy = disk.point / ".snapmgr" / "s1"
    assert _exact(ref) == _du(copy) == 0
    for number in range(16):
        _write(db / f"t{number}", 256 * 1024)
    run("sync", "-f", disk.point)
    assert _exact(ref) == _du(copy) == 4 * MIB
    (db / "t20").unlink()
    run("sync", "-f", disk.point)
    assert _exact(ref) == _du(copy) == 4 * MIB + 256 * 1024


def test_two_snapshots_share_what_neither_has_alone(disk):
    db = make_subvolume(disk.point / "db")
    _write(db / "old", 3 * MIB)
    one = take(BACKEND, db, "s1")
    _write(db / "new", 2 * MIB)
    two = take(BACKEND, db, "s2")
    (db / "old").unlink()
    (db / "new").unlink()
    run("sync", "-f", disk.point)
    assert (_exact(one), _exact(two)) == (0, 2 * MIB)
    BACKEND.delete(two, wait="space")
    assert _exact(one) == 3 * MIB


def test_random_overwrites_agree_with_the_quota_group(disk):
    db = make_subvolume(disk.point / "db")
    _write(db / "ibdata", 32 * MIB)
    ref = take(BACKEND, db, "s1")
    run("btrfs", "quota", "enable", disk.point)
    run("btrfs", "quota", "rescan", "-w", disk.point)
    for page in range(0, 32 * MIB, 64 * 1024):
        _write(db / "ibdata", 16 * 1024, at=page, flags=os.O_WRONLY)
    _write(db / "ibdata", 32 * MIB, flags=os.O_WRONLY)
    run("sync", "-f", disk.point)
    cheap = BACKEND.usage(ref).exclusive_bytes
    # The quota group counts the metadata too: some blocks of 16 KiB.
    assert _exact(ref) <= cheap <= _exact(ref) + MIB
    assert _exact(ref) == 32 * MIB


def test_an_extent_that_the_origin_still_needs_a_part_of_is_not_freed(disk):
    db = make_subvolume(disk.point / "db")
    _write(db / "file", 4 * MIB)
    ref = take(BACKEND, db, "s1")
    _write(db / "file", 3 * MIB, flags=os.O_WRONLY)
    run("sync", "-f", disk.point)
    assert _exact(ref) == 0
    _write(db / "file", 4 * MIB, flags=os.O_WRONLY)
    run("sync", "-f", disk.point)
    assert _exact(ref) == 4 * MIB


def test_compressed_data_count_as_they_lie_on_disk(disk):
    db = make_subvolume(disk.point / "db")
    run("btrfs", "property", "set", db, "compression", "zstd")
    (db / "text").write_bytes(b"the same words again and again " * 700_000)
    run("sync", "-f", disk.point)
    ref = take(BACKEND, db, "s1")
    run("btrfs", "quota", "enable", disk.point)
    run("btrfs", "quota", "rescan", "-w", disk.point)
    (db / "text").unlink()
    run("sync", "-f", disk.point)
    exact, cheap = _exact(ref), BACKEND.usage(ref).exclusive_bytes
    assert 0 < exact < 2 * MIB
    assert exact <= cheap <= exact + 256 * 1024
    # FIEMAP, which knows no sizes on disk, would say ten times as much.
    assert _du(disk.point / ".snapmgr" / "s1") > 10 * exact


def test_what_is_shared_only_inside_the_snapshot_is_its_own(disk):
    db = make_subvolume(disk.point / "db")
    _write(db / "file", 2 * MIB)
    subprocess.run(["cp", "--reflink=always", db / "file", db / "copy"], check=True)
    ref = take(BACKEND, db, "s1")
    (db / "file").unlink()
    run("sync", "-f", disk.point)
    assert _exact(ref) == 0
    (db / "copy").unlink()
    run("sync", "-f", disk.point)
    assert _exact(ref) == 2 * MIB


def test_holes_inline_files_and_preallocated_space(disk):
    db = make_subvolume(disk.point / "db")
    (db / "tiny").write_text("inline")
    with (db / "sparse").open("wb") as file:
        file.truncate(100 * MIB)
    run("fallocate", "-l", str(2 * MIB), db / "log")
    ref = take(BACKEND, db, "s1")
    for name in ("tiny", "sparse", "log"):
        (db / name).unlink()
    run("sync", "-f", disk.point)
    assert _exact(ref) == 2 * MIB


def test_a_tree_of_many_items_is_searched_to_its_end(disk):
    db = make_subvolume(disk.point / "db")
    # About 30,000 items, several times what one search returns; inline, but for one file at either end.
    _write(db / "aaa", MIB)
    for number in range(6000):
        (db / f"f{number:05}").write_bytes(b"x" * 200)
    _write(db / "zzz", MIB)
    run("sync", "-f", disk.point)
    ref = take(BACKEND, db, "s1")
    (db / "aaa").unlink()
    (db / "zzz").unlink()
    run("sync", "-f", disk.point)
    assert _exact(ref) == 2 * MIB == _du(disk.point / ".snapmgr" / "s1")
