"""What was read through scratch space that ran full counts for nothing, whichever command read it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapmgr.backup.run import backup
from snapmgr.catalog.store import Catalog
from snapmgr.config.model import Verify
from snapmgr.contract.errors import MissingRequirementError
from snapmgr.contract.records import Reason
from snapmgr.restore.run import restore
from snapmgr.verify.clone import clone, plan_clone
from snapmgr.verify.prepare import prepare
from snapmgr.verify.run import verify
from snapmgr_btrfs import BtrfsBackend, BtrfsConfig

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")

_FULL = Reason(what="its scratch space is full", hint="raise scratch_size")


@pytest.fixture
def full(monkeypatch):
    """From now on each attachment's scratch space is full; yields the leases' records that were asked about."""
    asked = []

    # A class of its own: that a class has an ability is remembered by Python beyond the end of a patch.
    class Unsound(BtrfsBackend):
        def attachment_problem(self, record):
            asked.append(record.id)
            return _FULL

    monkeypatch.setattr(
        "snapmgr.context.make_backend",
        lambda _name, _table, runner, mounter: Unsound(BtrfsConfig(), runner, mounter),
    )
    return asked


def _nothing_left(scene):
    assert Catalog(scene.state).leases()[0] == []
    assert [name for name in scene.stored() if name.startswith("attach")] == []


def test_no_verification_is_recorded_and_nothing_is_restored(files, full):
    data = Path(files.file_system.point) / "mysql" / "files"
    data.mkdir(exist_ok=True)
    (data / "a").write_text("something")
    files.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n')
    ctx = files.context()
    entry = ctx.catalog.load(backup(ctx, ctx.config.job("demo")).id)
    for check in ("true", "false"):
        with pytest.raises(MissingRequirementError, match="its scratch space is full"):
            verify(ctx, entry, Verify(command=(check,)))
        assert ctx.catalog.load(entry.manifest.id).verification is None
    dest = files.folder / "copy"
    with pytest.raises(MissingRequirementError, match="its scratch space is full") as caught:
        restore(ctx, entry, str(dest))
    assert caught.value.hint == "raise scratch_size"
    assert not dest.exists()
    assert len(full) == 3
    _nothing_left(files)


@pytest.mark.needs("mariadbd")
def test_no_recovered_datadir_and_no_clone_is_handed_out(scene, full):
    ctx = scene.context()
    entry = ctx.catalog.load(backup(ctx, ctx.config.job("demo")).id)
    with pytest.raises(MissingRequirementError, match="its scratch space is full"):
        prepare(ctx, entry)
    with pytest.raises(MissingRequirementError, match="its scratch space is full"):
        clone(ctx, plan_clone(ctx, entry, str(scene.folder / "clone"), memory_bytes=64 << 20))
    assert len(full) == 2
    assert os.listdir(scene.scratch) == []
    _nothing_left(scene)
