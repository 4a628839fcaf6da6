"""btrfs: a snapshot that somebody changed is told from one that is as it was taken."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

import pytest

from snapmgr.api import AlteredError
from support.btrfs import attached, btrfs_disk, locate, make_backend, make_subvolume, new_record, run, take

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.api import Found
    from support.storage import LoopFileSystem

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")
BACKEND = make_backend()


@pytest.fixture(name="disk", scope="module")
def _disk() -> Iterator[LoopFileSystem]:
    with btrfs_disk() as disk:
        yield disk


@pytest.fixture(name="origin", scope="module")
def _origin(disk: LoopFileSystem) -> Path:
    return make_subvolume(disk.point / "db", file="data")


@pytest.fixture(name="folder", scope="module")
def _folder(disk: LoopFileSystem, origin: Path) -> Path:
    (origin / "a" / "b").mkdir(parents=True)
    (origin / "a" / "b" / "deep").write_text("x" * 10_000)
    return disk.point / ".snapmgr"


def _found(disk: LoopFileSystem) -> dict[str, Found]:
    pool = locate(BACKEND, disk.point / "db").pool
    return {found.name: found for found in BACKEND.inventory((pool,))}


def _set_read_only(path: Path, value: str) -> None:
    run("btrfs", "property", "set", path, "ro", value)


def test_a_snapshot_that_was_changed_and_made_read_only_again_is_told_from_what_was_taken(
    disk: LoopFileSystem, origin: Path, folder: Path
) -> None:
    ref = take(BACKEND, origin, "first")
    _set_read_only(folder / "first", "false")
    (folder / "first" / "file").write_text("changed!")
    _set_read_only(folder / "first", "true")
    found = _found(disk)["first"]
    assert (found.kind, found.ref) == ("debris", ref)
    assert "made read-only again" in found.why
    for writable in (True, False):
        with pytest.raises(AlteredError, match="it no longer holds what was taken"):
            BACKEND.attach(new_record(ref, writable=writable))
    BACKEND.repair(found)
    assert (folder / "first" / "file").read_text() == "changed!"
    BACKEND.delete(ref)


@pytest.mark.parametrize("change", ["none", "removed", "renamed", "mode", "deep"])
def test_every_change_is_seen_and_opening_alone_is_none(
    disk: LoopFileSystem, origin: Path, folder: Path, change: str
) -> None:
    ref = take(BACKEND, origin, "second")
    data = folder / "second"
    _set_read_only(data, "false")
    if change == "removed":
        (data / "file").unlink()
    elif change == "renamed":
        (data / "file").rename(data / "else")
    elif change == "mode":
        (data / "file").chmod(0o600)
    elif change == "deep":
        with (data / "a" / "b" / "deep").open("r+b") as file:
            file.write(b"y")
    _set_read_only(data, "true")
    run("sync")
    assert _found(disk)["second"].kind == ("snapshot" if change == "none" else "debris")
    BACKEND.delete(ref)


def test_deduplication_and_balancing_change_no_snapshot(disk: LoopFileSystem, origin: Path, folder: Path) -> None:
    content = os.urandom(1 << 20)
    for name in ("one", "two"):
        (origin / name).write_bytes(content)
    ref = take(BACKEND, origin, "second")
    # FIDEDUPERANGE: offset, length, count of destinations; descriptor, offset, bytes done, status.
    request = bytearray(struct.pack("=QQHHI", 0, 1 << 20, 1, 0, 0) + struct.pack("=qQQiI", 0, 0, 0, 0, 0))
    with (folder / "second" / "one").open("rb") as one, (folder / "second" / "two").open("rb") as two:
        struct.pack_into("=q", request, 24, two.fileno())
        fcntl.ioctl(one.fileno(), 0xC0189436, request)
    assert struct.unpack_from("=Qi", request, 40) == (1 << 20, 0)
    run("btrfs", "balance", "start", "--full-balance", disk.point)
    assert _found(disk)["second"].kind == "snapshot"
    with attached(BACKEND, new_record(ref)) as clone:
        assert (clone / "two").read_bytes() == content
    BACKEND.delete(ref)
