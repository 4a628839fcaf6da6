"""Tests the contract of `attach` and `detach`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.api import NotFoundError
from snapmgr.testing import processes, trees
from snapmgr.testing.lab import Contract, Lab, new_record
from snapmgr.testing.trees import fingerprint, plant, same

if TYPE_CHECKING:
    from snapmgr.api import Pool


def _attachments(lab: Lab, pool: Pool) -> list[str | None]:
    return [found.record_id for found in lab.found(pool) if found.kind == "attachment"]


def _need_clones(lab: Lab) -> None:
    if lab.backend().capabilities((lab.volume(lab.make_origin()),)).clone == "none":
        pytest.skip("this backend makes no writable clones")


class AttachingContract(Contract):
    """The contract of attachments."""

    def test_attachment_is_a_directory_or_a_device(self, lab: Lab) -> None:
        """An attachment has either a directory, or a device with its file system."""
        ref = lab.take_one(lab.make_origin())
        record = new_record(ref, writable=False)
        attachment = lab.backend().attach(record)
        try:
            assert (attachment.directory is None) != (attachment.device is None)
            if attachment.directory is not None:
                assert os.path.isdir(attachment.directory)
                assert attachment.fs_type is None
                assert attachment.options == ()
            else:
                assert attachment.fs_type
        finally:
            lab.backend().detach(record)

    def test_attachments_are_in_the_inventory(self, lab: Lab) -> None:
        """A writable clone is found by its record's id, also by another process, until it is detached."""
        _need_clones(lab)
        ref = lab.take_one(lab.make_origin())
        before = _attachments(lab, ref.pool)
        record = new_record(ref, writable=True)
        lab.backend().attach(record)
        assert _attachments(lab, ref.pool) == [*before, record.id] or record.id in _attachments(lab, ref.pool)
        assert [found.ref for found in lab.found(ref.pool) if found.kind == "snapshot"].count(ref) == 1
        assert processes.succeeds(processes.spawn(lambda: lab.backend().detach(record)))
        assert _attachments(lab, ref.pool) == before

    def test_writable_clone_changes_nothing_else(self, lab: Lab) -> None:
        """Changes of a clone change neither the snapshot nor the origin."""
        _need_clones(lab)
        origin = lab.make_origin()
        plant(origin)
        ref, before = lab.take_one(origin), fingerprint(origin)
        with lab.attached(ref, writable=True) as reached:
            inside = lab.inside(reached, origin)
            same(before, fingerprint(inside))
            trees.overwrite(inside)
            assert fingerprint(inside) != before
            same(before, fingerprint(origin))
        with lab.attached(ref, writable=False) as reached:
            same(before, fingerprint(lab.inside(reached, origin)))

    def test_two_clones_at_once(self, lab: Lab) -> None:
        """Clones of one snapshot are independent; a reader beside them sees the snapshot."""
        _need_clones(lab)
        origin = lab.make_origin()
        (origin / "file").write_text("origin")
        ref = lab.take_one(origin)
        with (
            lab.attached(ref, writable=True) as one,
            lab.attached(ref, writable=True) as two,
            lab.attached(ref, writable=False) as reader,
        ):
            files = [lab.inside(reached, origin) / "file" for reached in (one, two, reader)]
            files[0].write_text("one")
            files[1].write_text("two")
            assert [file.read_text() for file in files] == ["one", "two", "origin"]

    def test_two_readers_at_once(self, lab: Lab) -> None:
        """The end of one reader does not affect the other."""
        origin = lab.make_origin()
        (origin / "file").write_text("origin")
        ref = lab.take_one(origin)
        with lab.attached(ref, writable=False) as one:
            with lab.attached(ref, writable=False) as two:
                assert (lab.inside(two, origin) / "file").read_text() == "origin"
            assert (lab.inside(one, origin) / "file").read_text() == "origin"

    def test_detach_again_and_unknown(self, lab: Lab) -> None:
        """Detaching is idempotent: repeated, never attached, after a reboot, by another instance.

        Others stay attached.
        """
        origin = lab.make_origin()
        (origin / "file").write_text("origin")
        ref = lab.take_one(origin)
        record, other = new_record(ref, writable=False), new_record(ref, writable=False)
        lab.backend().attach(other)
        try:
            lab.backend().detach(record)
            lab.backend().attach(record)
            earlier_boot = replace(record, boot_id="00000000-0000-0000-0000-000000000000")
            lab.backend().detach(earlier_boot)
            lab.backend().detach(earlier_boot)
            lab.backend().detach(record)
        finally:
            lab.backend().detach(other)
        with lab.attached(ref, writable=False) as reached:
            assert (lab.inside(reached, origin) / "file").read_text() == "origin"

    def test_detach_after_the_snapshot_is_gone(self, lab: Lab) -> None:
        """A record of a snapshot that no longer exists can still be detached."""
        ref = lab.take_one(lab.make_origin())
        record = new_record(ref, writable=True)
        lab.backend().delete(ref)
        lab.backend().detach(record)

    def test_attach_what_is_gone(self, lab: Lab) -> None:
        """A deleted snapshot cannot be attached, and the attempt leaves nothing."""
        ref = lab.take_one(lab.make_origin())
        lab.backend().delete(ref)
        before = lab.found(ref.pool)
        for writable in (False, True):
            with pytest.raises(NotFoundError):
                lab.backend().attach(new_record(ref, writable=writable))
        assert lab.found(ref.pool) == before

    def test_attach_with_another_native_id(self, lab: Lab) -> None:
        """Only the native id identifies a snapshot: one with the same name and another id is not attached."""
        origin = lab.make_origin()
        ref, other = lab.take_one(origin), lab.take_one(origin)
        lab.backend().delete(other)
        before = lab.found(ref.pool)
        mixed = replace(ref, native_id=other.native_id)
        for writable in (False, True):
            with pytest.raises(NotFoundError):
                lab.backend().attach(new_record(mixed, writable=writable))
        assert lab.found(ref.pool) == before

    def test_attach_an_impostor(self, lab: Lab) -> None:
        """An object that somebody put under the snapshot's name is neither attached nor changed."""
        origin = lab.make_origin()
        ref = lab.take_one(origin)
        untouched = lab.impostor(ref)
        for writable in (False, True):
            with pytest.raises(NotFoundError):
                lab.backend().attach(new_record(ref, writable=writable))
        assert untouched()
