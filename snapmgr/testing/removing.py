"""Tests the contract of `delete` and `usage`."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

from snapmgr.api import BatchDeleting, InUseError, NotFoundError, SnapmgrError, StorageError
from snapmgr.testing.lab import Contract, Lab, new_record
from snapmgr.testing.trees import fingerprint, flush, plant, same

_REWRITTEN_BYTES = 4 << 20


class RemovingContract(Contract):
    """The contract of deleting snapshots."""

    def test_delete_takes_this_one(self, lab: Lab) -> None:
        """A deleted snapshot is gone from the inventory; the others and the origin stay."""
        origin = lab.make_origin()
        plant(origin)
        first, second, before = lab.take_one(origin), lab.take_one(origin), fingerprint(origin)
        lab.backend().annotate(first, b"a note")
        lab.backend().delete(first)
        assert [found for found in lab.found(first.pool) if found.snapshot_id == first.snapshot_id] == []
        same(before, fingerprint(origin))
        with lab.attached(second, writable=False) as reached:
            same(before, fingerprint(lab.inside(reached, origin)))

    def test_delete_again(self, lab: Lab) -> None:
        """Deleting a missing snapshot is not an error, with any `wait`."""
        ref = lab.take_one(lab.make_origin())
        lab.backend().delete(ref, wait="space")
        lab.backend().delete(ref, wait="space")
        lab.backend().delete(ref, wait="name")

    def test_delete_gives_the_space_back(self, lab: Lab) -> None:
        """``wait="space"`` returns when the snapshot's own blocks are free again."""
        origin = lab.make_origin()
        volume = lab.volume(origin)
        (origin / "big").write_bytes(os.urandom(_REWRITTEN_BYTES * 8))
        ref = lab.take_one(origin)
        (origin / "big").unlink()
        lab.trim(origin)
        lab.backend().settle((lab.take_one(lab.make_origin()),), 60)
        reservoirs = lab.backend().headroom(volume)
        if not reservoirs:
            pytest.skip("this backend knows no reservoir")
        lab.backend().delete(ref, wait="space")
        freed = max(
            before.used_bytes - after.used_bytes
            for before, after in zip(reservoirs, lab.backend().headroom(volume), strict=True)
        )
        assert freed >= _REWRITTEN_BYTES * 7

    def test_delete_what_is_attached(self, lab: Lab) -> None:
        """An attached snapshot is not deleted, writable or not; a detached one is."""
        origin = lab.make_origin()
        plant(origin)
        ref, before = lab.take_one(origin), fingerprint(origin)
        kinds = [False]
        if lab.backend().capabilities((lab.volume(origin),)).clone != "none":
            kinds.append(True)
        for writable in kinds:
            with lab.attached(ref, writable=writable) as reached:
                with pytest.raises(InUseError):
                    lab.backend().delete(ref)
                same(before, fingerprint(lab.inside(reached, origin)))
        lab.backend().delete(ref)
        assert [found for found in lab.found(ref.pool) if found.snapshot_id == ref.snapshot_id] == []

    def test_delete_batch(self, lab: Lab) -> None:
        """A batch says for each snapshot whether it is gone; one that is in use, or is not it, does not stop others."""
        backend = lab.backend()
        if not isinstance(backend, BatchDeleting):
            return
        assert backend.delete_batch(()) == ()
        origin = lab.make_origin()
        plant(origin)
        kept, first, gone, used, last = (lab.take_one(origin) for _ in range(5))
        backend.delete(gone)
        foreign = replace(kept, native_id=gone.native_id)
        before = fingerprint(origin)
        with lab.attached(used, writable=False) as reached:
            errors = backend.delete_batch((first, foreign, gone, used, last))
            same(before, fingerprint(lab.inside(reached, origin)))
        assert [type(error) for error in errors] == [type(None), StorageError, type(None), InUseError, type(None)]
        left = [
            found.ref for found in lab.found(kept.pool) if found.snapshot_id in {first.snapshot_id, last.snapshot_id}
        ]
        assert left == []
        assert {kept, used} <= {found.ref for found in lab.found(kept.pool)}
        assert backend.delete_batch((first, used, kept), wait="space") == (None, None, None)
        with lab.unreachable(kept.pool):
            assert all(isinstance(error, StorageError) for error in backend.delete_batch((kept, used)))

    def test_delete_with_another_native_id(self, lab: Lab) -> None:
        """The native id must match; otherwise neither snapshot is deleted."""
        origin = lab.make_origin()
        ref, other = lab.take_one(origin), lab.take_one(origin)
        lab.backend().delete(other)
        for foreign in (other.native_id, "no-such-id"):
            with pytest.raises(StorageError):
                lab.backend().delete(replace(ref, native_id=foreign))
        assert [found.ref for found in lab.found(ref.pool) if found.snapshot_id == ref.snapshot_id] == [ref]

    def test_impostor_survives(self, lab: Lab) -> None:
        """An object that somebody put under the snapshot's name is not ours, and is never touched."""
        origin = lab.make_origin()
        plant(origin)
        ref = lab.take_one(origin)
        untouched = lab.impostor(ref)
        assert untouched(), "the lab's impostor is not there"
        assert [found for found in lab.found(ref.pool) if found.ref == ref or found.name == ref.name] == []
        with pytest.raises(StorageError):
            lab.backend().delete(ref)
        with pytest.raises(SnapmgrError):
            lab.backend().annotate(ref, b"not for this one")
        with pytest.raises(NotFoundError):
            lab.backend().settle((ref,), 60)
        with pytest.raises(NotFoundError):
            lab.backend().usage(ref)
        lab.repair_all(ref.pool)
        assert untouched()

    def test_survives_origin_if_promised(self, lab: Lab) -> None:
        """A snapshot without its origin is listed, is complete if that is promised, and can be deleted."""
        origin = lab.make_origin()
        plant(origin)
        volume, before = lab.volume(origin), fingerprint(origin)
        survives = lab.backend().capabilities((volume,)).survives_origin
        ref = lab.take_one(origin)
        lab.remove_origin(origin)
        found = [thing for thing in lab.found(ref.pool) if thing.snapshot_id == ref.snapshot_id]
        if survives:
            assert [(thing.kind, thing.ref) for thing in found] == [("snapshot", ref)]
            record = new_record(ref, writable=False)
            with lab.reached(lab.backend().attach(record), writable=False) as reached:
                same(before, fingerprint(reached / volume.subpath))
            lab.backend().detach(record)
        lab.backend().delete(ref)
        assert [thing for thing in lab.found(ref.pool) if thing.snapshot_id == ref.snapshot_id] == []

    def test_usage(self, lab: Lab) -> None:
        """Usage is a number or unknown; an exact number grows as the origin changes."""
        origin = lab.make_origin()
        (origin / "big").write_bytes(os.urandom(_REWRITTEN_BYTES))
        ref = lab.take_one(origin)
        for exact in (False, True):
            usage = lab.backend().usage(ref, exact=exact)
            assert usage.valid
            assert usage.exclusive_bytes is None or usage.exclusive_bytes >= 0
        before = lab.backend().usage(ref, exact=True).exclusive_bytes
        if before is None:
            pytest.skip("this backend never knows")
        with open(origin / "big", "r+b") as file:
            file.write(os.urandom(_REWRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        flush(origin)
        after = lab.backend().usage(ref, exact=True).exclusive_bytes
        assert after is not None
        assert after >= _REWRITTEN_BYTES * 9 // 10
        assert after >= before

    def test_usage_of_what_is_gone(self, lab: Lab) -> None:
        """A deleted snapshot has no usage."""
        ref = lab.take_one(lab.make_origin())
        lab.backend().delete(ref)
        for exact in (False, True):
            with pytest.raises(NotFoundError):
                lab.backend().usage(ref, exact=exact)

    def test_settle_of_what_is_gone(self, lab: Lab) -> None:
        """A deleted snapshot cannot be settled."""
        ref = lab.take_one(lab.make_origin())
        lab.backend().delete(ref)
        with pytest.raises(NotFoundError):
            lab.backend().settle((ref,), 60)
