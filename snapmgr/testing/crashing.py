"""Tests the contract after SIGKILL at any moment, and with several concurrent processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from snapmgr.testing import processes
from snapmgr.testing.lab import Contract, Lab, new_id, new_record
from snapmgr.testing.trees import fingerprint, plant, same

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.api import SnapshotRef


def _origin(lab: Lab) -> Path:
    """Create an origin that is large enough for an operation to be killed in the middle."""
    origin = lab.make_origin()
    plant(origin)
    (origin / "many").mkdir()
    for number in range(lab.files):
        (origin / "many" / str(number)).write_bytes(bytes([number % 256]) * 4096)
    return origin


def _expect_only(lab: Lab, *refs: SnapshotRef) -> None:
    """Repair debris; then exactly `refs` exist in the pool, complete."""
    pool = refs[0].pool
    lab.repair_all(pool)
    left = lab.found(pool)
    ids = {ref.snapshot_id for ref in refs}
    assert [found for found in left if found.kind == "debris"] == []
    assert sorted(str(found.ref) for found in left if found.snapshot_id in ids) == sorted(str(ref) for ref in refs)


class CrashingContract(Contract):
    """The contract after a crash: cleanup finds everything of ours and touches nothing else."""

    def test_killed_while_armed(self, lab: Lab) -> None:
        """A process that dies with an armed snapshot leaves at most debris, which can be repaired."""
        origin = _origin(lab)
        ref, snapshot_id = lab.take_one(origin), new_id()
        volume = lab.volume(origin)

        def arm() -> None:
            with lab.backend().arm((volume,), snapshot_id):
                time.sleep(60)

        processes.kill_after(arm, 0.3)
        assert [found for found in lab.found(ref.pool) if found.snapshot_id == snapshot_id and found.ref] == []
        _expect_only(lab, ref)
        assert [found for found in lab.found(ref.pool) if found.snapshot_id == snapshot_id] == []
        # The name is free again, so the next run can use the id.
        lab.take(origin, snapshot_id=snapshot_id)

    def test_killed_while_arming_and_firing(self, lab: Lab) -> None:
        """Killed at any moment from `arm` to `settle`, a run leaves a whole snapshot or debris, never half of one."""
        origin = _origin(lab)
        ref, wanted = lab.take_one(origin), fingerprint(origin)

        def run(snapshot_id: str) -> None:
            backend = lab.backend()
            with backend.arm((lab.volume(origin),), snapshot_id) as armed:
                armed.sync()
                armed.launched = True
                shots = armed.fire(time.monotonic() + 60)
            backend.settle(tuple(shot.ref for shot in shots), 60)

        for delay_s in processes.moments(processes.duration_s(lambda: run(new_id())), lab.kills):
            snapshot_id = new_id()
            processes.kill_after(lambda snapshot_id=snapshot_id: run(snapshot_id), delay_s)  # type: ignore[misc]
            made = [found.ref for found in lab.found(ref.pool) if found.snapshot_id == snapshot_id and found.ref]
            for half in made:
                lab.backend().settle((half,), 60)
                with lab.attached(half, writable=False) as reached:
                    same(wanted, fingerprint(lab.inside(reached, origin)))
            _expect_only(lab, ref, *made)
            for half in made:
                lab.backend().delete(half)
        with lab.attached(ref, writable=False) as reached:
            same(wanted, fingerprint(lab.inside(reached, origin)))

    def test_killed_while_attaching(self, lab: Lab) -> None:
        """Wherever `attach` was killed, `detach` with its record and a repair remove it; the snapshot stays."""
        origin = _origin(lab)
        ref, wanted = lab.take_one(origin), fingerprint(origin)
        writable = lab.backend().capabilities((lab.volume(origin),)).clone != "none"
        whole = new_record(ref, writable=writable)
        took_s = processes.duration_s(lambda: lab.backend().attach(whole))
        lab.backend().detach(whole)
        for delay_s in processes.moments(took_s, lab.kills):
            record = new_record(ref, writable=writable)
            processes.kill_after(lambda record=record: lab.backend().attach(record), delay_s)  # type: ignore[misc]
            lab.backend().detach(record)
            lab.backend().detach(record)
            assert [found for found in lab.found(ref.pool) if found.record_id == record.id] == []
            _expect_only(lab, ref)
        with lab.attached(ref, writable=False) as reached:
            same(wanted, fingerprint(lab.inside(reached, origin)))

    def test_killed_while_detaching(self, lab: Lab) -> None:
        """The next `detach` finishes an interrupted one."""
        origin = _origin(lab)
        ref = lab.take_one(origin)
        writable = lab.backend().capabilities((lab.volume(origin),)).clone != "none"
        whole = new_record(ref, writable=writable)
        lab.backend().attach(whole)
        for delay_s in processes.moments(processes.duration_s(lambda: lab.backend().detach(whole)), lab.kills):
            record = new_record(ref, writable=writable)
            lab.backend().attach(record)
            processes.kill_after(lambda record=record: lab.backend().detach(record), delay_s)  # type: ignore[misc]
            lab.backend().detach(record)
            _expect_only(lab, ref)
            assert [found for found in lab.found(ref.pool) if found.record_id == record.id] == []

    def test_killed_while_deleting(self, lab: Lab) -> None:
        """An interrupted deletion leaves a complete snapshot or none; the next deletion or a repair finishes it."""
        origin = _origin(lab)
        kept, wanted = lab.take_one(origin), fingerprint(origin)
        first = lab.take_one(origin)
        took_s = processes.duration_s(lambda: lab.backend().delete(first))
        for index, delay_s in enumerate(processes.moments(took_s, lab.kills)):
            ref = lab.take_one(origin)
            processes.kill_after(lambda ref=ref: lab.backend().delete(ref, wait="space"), delay_s)  # type: ignore[misc]
            whole = [found.ref for found in lab.found(ref.pool) if found.snapshot_id == ref.snapshot_id and found.ref]
            if whole:
                assert whole == [ref]
                with lab.attached(ref, writable=False) as reached:
                    same(wanted, fingerprint(lab.inside(reached, origin)))
            if index % 2 or whole:
                lab.backend().delete(ref, wait="space")
            _expect_only(lab, kept)
            assert [found for found in lab.found(ref.pool) if found.snapshot_id == ref.snapshot_id] == []
        with lab.attached(kept, writable=False) as reached:
            same(wanted, fingerprint(lab.inside(reached, origin)))

    def test_several_processes_at_once(self, lab: Lab) -> None:
        """Concurrent runs on different origins of a pool do not disturb each other, nor do readers of the inventory."""
        origins = [_origin(lab) for _ in range(3)]
        pool = lab.take_one(origins[0]).pool

        def work(origin: Path) -> None:
            for _ in range(lab.rounds):
                ref = lab.take_one(origin)
                lab.backend().annotate(ref, b"mine")
                with lab.attached(ref, writable=False) as reached:
                    same(fingerprint(origin), fingerprint(lab.inside(reached, origin)))
                lab.backend().delete(ref, wait="space")

        pids = [processes.spawn(lambda origin=origin: work(origin)) for origin in origins]  # type: ignore[misc]
        for _ in range(lab.looks):
            lab.found(pool)
        results = [processes.succeeds(pid) for pid in pids]
        assert results == [True, True, True]
        assert [found for found in lab.found(pool) if found.kind != "snapshot"] == []
