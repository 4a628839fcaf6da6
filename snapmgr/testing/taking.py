"""Tests the contract of taking a snapshot: `arm`, `Armed`, `settle`, `annotate`, and the snapshot's contents."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.api import FireError, StorageError
from snapmgr.backup.trigger import Trigger
from snapmgr.testing import processes, trees
from snapmgr.testing.lab import Contract, Lab, new_id
from snapmgr.testing.trees import fingerprint, plant, same

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.api import Found, Shot, SnapshotRef

_NOTE_BYTES_AT_MOST = 64 << 10
_FD_FOLDER = "/proc/self/fd"


def _open_fds() -> set[int]:
    # The folder's own descriptor is in the list, and closed by now.
    return {int(name) for name in os.listdir(_FD_FOLDER) if os.path.lexists(f"{_FD_FOLDER}/{name}")}


def _of(found: tuple[Found, ...], snapshot_id: str) -> list[Found]:
    return [thing for thing in found if thing.snapshot_id == snapshot_id]


class TakingContract(Contract):
    """The contract of taking a snapshot, and of its contents."""

    def test_leaving_unfired_undoes(self, lab: Lab) -> None:
        """An armed snapshot that is not fired leaves no name, debris or descriptor, also after an error."""
        origin = lab.make_origin()
        plant(origin)
        lab.take_one(origin)
        volume = lab.volume(origin)
        before, files = lab.found(volume.pool), fingerprint(origin)
        backend, open_fds = lab.backend(), _open_fds()
        with backend.arm((volume,), new_id()) as armed:
            armed.sync()
        with pytest.raises(ZeroDivisionError), backend.arm((volume,), new_id()):
            _ = 1 // 0
        assert lab.found(volume.pool) == before
        same(files, fingerprint(origin))
        assert _open_fds() == open_fds, "descriptors leaked"

    def test_armed_says_what_will_be(self, lab: Lab) -> None:
        """Each volume has one intent, in order, known before anything exists; descriptors are open."""
        volumes = tuple(lab.volume(lab.make_origin()) for _ in range(2))
        with lab.backend().arm(volumes, new_id()) as armed:
            assert not armed.launched
            assert [(intent.pool, intent.volume_id) for intent in armed.intents] == [
                (volume.pool, volume.id) for volume in volumes
            ]
            assert len({intent.name for intent in armed.intents}) == len(volumes)
            assert math.isfinite(armed.stall_s)
            assert armed.stall_s >= 0
            for fd in armed.fds:
                os.fstat(fd)
            armed.sync()
            armed.sync()

    def test_one_shot_an_intent_in_order(self, lab: Lab) -> None:
        """Fired in a helper with only `fds`, each intent gets a shot, under its name and taken during the call."""
        origins = [lab.make_origin() for _ in range(3)]
        for number, origin in enumerate(origins):
            (origin / "number").write_text(str(number))
        backend, snapshot_id = lab.backend(), new_id()
        volumes = tuple(lab.volume(origin) for origin in origins)
        open_fds = _open_fds()
        with backend.arm(volumes, snapshot_id) as armed:
            intents = armed.intents
            with Trigger(armed, _keep) as trigger:
                start_ns = time.monotonic_ns()
                trigger.fire(time.monotonic() + 60)
                finish_ns = time.monotonic_ns()
                shots = trigger.shots()
            assert armed.launched
        assert _open_fds() == open_fds, "descriptors leaked"
        backend.settle(tuple(shot.ref for shot in shots), 60)
        for intent, volume, shot in zip(intents, volumes, shots, strict=True):
            assert start_ns <= shot.start_ns <= shot.finish_ns <= finish_ns
            ref = shot.ref
            assert (ref.backend, ref.snapshot_id, ref.pool, ref.volume_id, ref.name) == (
                lab.backend_class.name,
                snapshot_id,
                volume.pool,
                volume.id,
                intent.name,
            )
            assert ref.native_id
        assert len({shot.ref.native_id for shot in shots}) == len(shots)
        for number, shot in enumerate(shots):
            with lab.attached(shot.ref, writable=False) as reached:
                assert (lab.inside(reached, origins[number]) / "number").read_text() == str(number)

    def test_past_deadline_nothing_is_begun(self, lab: Lab) -> None:
        """After the deadline no member is started: there is no snapshot, and leftovers can be repaired."""
        origin = lab.make_origin()
        plant(origin)
        volume, snapshot_id = lab.volume(origin), new_id()
        with lab.backend().arm((volume,), snapshot_id) as armed:
            armed.launched = True
            with pytest.raises(FireError) as caught:
                armed.fire(time.monotonic() - 1)
        assert caught.value.shots == ()
        assert [found for found in _of(lab.found(volume.pool), snapshot_id) if found.kind == "snapshot"] == []
        lab.repair_all(volume.pool)
        assert _of(lab.found(volume.pool), snapshot_id) == []

    def test_launched_is_left_alone(self, lab: Lab) -> None:
        """Once launched, leaving removes nothing: a slow helper may still take its snapshot."""
        origin = lab.make_origin()
        plant(origin)
        backend, volume, snapshot_id = lab.backend(), lab.volume(origin), new_id()
        with backend.arm((volume,), snapshot_id) as armed:
            armed.launched = True
            shots: tuple[Shot, ...] = armed.fire(time.monotonic() + 60)
        (found,) = _of(lab.found(volume.pool), snapshot_id)
        assert found.name == shots[0].ref.name
        # Another process completes a run that crashed between proof and settling.
        assert processes.succeeds(processes.spawn(lambda: lab.backend().settle((shots[0].ref,), 60)))
        (found,) = _of(lab.found(volume.pool), snapshot_id)
        assert (found.kind, found.ref) == ("snapshot", shots[0].ref)
        with lab.attached(shots[0].ref, writable=False) as reached:
            same(fingerprint(origin), fingerprint(lab.inside(reached, origin)))

    def test_settle_again(self, lab: Lab) -> None:
        """Settling is idempotent, also in another instance, and changes nothing that can be seen."""
        origin = lab.make_origin()
        plant(origin)
        ref = lab.take_one(origin)
        before = lab.found(ref.pool)
        lab.backend().settle((ref,), 60)
        lab.backend().settle((ref, ref), 60)
        lab.backend().settle((), 60)
        assert lab.found(ref.pool) == before

    def test_same_id_again_is_refused(self, lab: Lab) -> None:
        """With an id in use `arm` fails, or at the latest `fire`; the first snapshot does not change."""
        origin = lab.make_origin()
        plant(origin)
        ref, before = lab.take_one(origin), fingerprint(origin)
        trees.overwrite(origin)
        with pytest.raises(StorageError):
            lab.take(origin, snapshot_id=ref.snapshot_id)
        with lab.attached(ref, writable=False) as reached:
            same(before, fingerprint(lab.inside(reached, origin)))
        assert [found.ref for found in _of(lab.found(ref.pool), ref.snapshot_id)] == [ref]

    def test_origin_gone_before_arm(self, lab: Lab) -> None:
        """A volume that no longer exists cannot be armed, and the attempt leaves nothing."""
        origin, other = lab.make_origin(), lab.make_origin()
        ref = lab.take_one(other)
        volume, before = lab.volume(origin), lab.found(ref.pool)
        lab.remove_origin(origin)
        with pytest.raises(StorageError), lab.backend().arm((volume,), new_id()):
            pass
        assert lab.found(ref.pool) == before

    def test_snapshot_holds_everything(self, lab: Lab) -> None:
        """Names that are not UTF-8, modes, owners, times, ACLs, attributes, links and devices are as in the origin."""
        origin = lab.make_origin()
        plant(origin)
        before = fingerprint(origin)
        ref = lab.take_one(origin)
        same(before, fingerprint(origin))
        with lab.attached(ref, writable=False) as reached:
            same(before, fingerprint(lab.inside(reached, origin)))

    def test_holes_stay_holes(self, lab: Lab) -> None:
        """A sparse file takes no more space in the snapshot than in the origin, except rounding to a block."""
        origin = lab.make_origin()
        plant(origin)
        if os.stat(origin / "sparse").st_blocks * 512 >= trees.HOLE_BYTES:
            pytest.skip("this file system has no holes")
        with lab.attached(lab.take_one(origin), writable=False) as reached:
            assert os.stat(lab.inside(reached, origin) / "sparse").st_blocks * 512 < trees.HOLE_BYTES // 4

    def test_later_changes_do_not_show(self, lab: Lab) -> None:
        """Later changes of the origin do not change the snapshot; a second snapshot has the new state."""
        origin = lab.make_origin()
        plant(origin)
        first, before = lab.take_one(origin), fingerprint(origin)
        trees.overwrite(origin)
        second, after = lab.take_one(origin), fingerprint(origin)
        assert before != after
        for ref, wanted in ((first, before), (second, after), (first, before)):
            with lab.attached(ref, writable=False) as reached:
                same(wanted, fingerprint(lab.inside(reached, origin)))

    def test_unflushed_writes_are_in_it(self, lab: Lab) -> None:
        """Data written before `fire` are in the snapshot, even if they were never flushed."""
        origin = lab.make_origin()
        volume, snapshot_id = lab.volume(origin), new_id()
        backend = lab.backend()
        with backend.arm((volume,), snapshot_id) as armed:
            (origin / "late").write_bytes(b"after sync" * 1000)
            armed.launched = True
            shots = armed.fire(time.monotonic() + 60)
        backend.settle((shots[0].ref,), 60)
        with lab.attached(shots[0].ref, writable=False) as reached:
            assert (lab.inside(reached, origin) / "late").read_bytes() == b"after sync" * 1000

    def test_one_instant_if_promised(self, lab: Lab) -> None:
        """Atomicity "volume": of two files written in turn, each on disk before the next, the second is never ahead.

        Many files lie between them, so that a copy made file by file takes long enough to be caught.
        """
        origin = lab.make_origin()
        if lab.backend().capabilities((lab.volume(origin),)).atomicity != "volume":
            pytest.skip("this backend promises no more than whole files")
        # Most file systems list entries in the order of their creation.
        for name in ("first", *(f"between-{number}" for number in range(500)), "second"):
            (origin / name).write_bytes(bytes(8))
        for ahead in (("first", "second"), ("second", "first")):
            pid = processes.spawn(lambda ahead=ahead: _write_in_turn(origin, *ahead))  # type: ignore[misc]
            try:
                _wait_for_write(origin / ahead[1])
                refs = [lab.take_one(origin) for _ in range(lab.race_rounds)]
            finally:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            seen = [_read_both(lab, origin, ref, ahead) for ref in refs]
            assert any(first > 0 for first, _ in seen), "the writer never ran: nothing was tested"
            assert all(first - second in {0, 1} for first, second in seen), (
                f"the second file is ahead, or a write is missing: {seen}"
            )
            for name in ("first", "second"):
                (origin / name).write_bytes(bytes(8))

    def test_notes_come_back(self, lab: Lab) -> None:
        """A note of up to 64 KiB is kept beside the snapshot; the last one counts; the data do not change.

        An inventory without notes returns the same but for them.
        """
        origin = lab.make_origin()
        plant(origin)
        ref, before = lab.take_one(origin), fingerprint(origin)
        other = lab.take_one(lab.make_origin())
        assert [found.note for found in _of(lab.found(ref.pool), ref.snapshot_id)] == [None]
        for note in (b"{}", bytes(range(256)) * (_NOTE_BYTES_AT_MOST // 256), b"", b'{"state": "ready"}\n'):
            lab.backend().annotate(ref, note)
            assert [found.note for found in _of(lab.found(ref.pool), ref.snapshot_id)] == [note]
        assert [found.note for found in _of(lab.found(ref.pool), other.snapshot_id)] == [None]
        bare = lab.backend().inventory((ref.pool,), notes=False)
        assert [replace(one, note=None) for one in lab.found(ref.pool)] == [replace(one, note=None) for one in bare]
        with lab.attached(ref, writable=False) as reached:
            same(before, fingerprint(lab.inside(reached, origin)))
        lab.backend().settle((ref,), 60)
        assert [found.note for found in _of(lab.found(ref.pool), ref.snapshot_id)] == [b'{"state": "ready"}\n']

    def test_inventory_is_complete(self, lab: Lab) -> None:
        """Another process finds every snapshot once, as the reference that `fire` returned."""
        origins = [lab.make_origin() for _ in range(2)]
        refs = [lab.take_one(origin) for origin in (*origins, origins[0])]

        def look() -> None:
            listed = [found.ref for found in lab.found(refs[0].pool) if found.kind == "snapshot"]
            for ref in refs:
                assert listed.count(ref) == 1, f"{ref} is {listed.count(ref)} times in the inventory"
            assert len(lab.found(refs[0].pool)) == len({found.name for found in lab.found(refs[0].pool)})

        assert processes.succeeds(processes.spawn(look))


def _keep(_shot: Shot) -> None:
    """Ignore a late snapshot."""


def _write_in_turn(origin: Path, first: str, second: str) -> None:
    fds = [os.open(origin / name, os.O_WRONLY | os.O_DSYNC) for name in (first, second)]
    for number in range(1, 10**9):
        for fd in fds:
            os.pwrite(fd, number.to_bytes(8, "big"), 0)


def _wait_for_write(path: Path) -> None:
    deadline = time.monotonic() + 60
    while path.read_bytes() == bytes(8):
        assert time.monotonic() < deadline, f"nobody wrote to {path}"
        time.sleep(0.005)


def _read_both(lab: Lab, origin: Path, ref: SnapshotRef, names: tuple[str, str]) -> tuple[int, int]:
    with lab.attached(ref, writable=False) as reached:
        inside = lab.inside(reached, origin)
        first, second = (int.from_bytes((inside / name).read_bytes(), "big") for name in names)
        return first, second
