"""A file system that holds all of it, data, copies and state directory, and is full: snapmgr makes room on it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Never

import pytest

from snapmgr.access.deletion import delete
from snapmgr.backup.run import backup
from snapmgr.contract.abilities import BatchDeleting
from snapmgr.contract.errors import InUseError, StorageError
from snapmgr.keep.prune import prune
from support.scene import Scene
from support.storage import fill, loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import SnapmgrError, SnapshotRef

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs")


@pytest.fixture(params=["xfs", "btrfs"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A directory job that keeps but one, and three snapshots; not a block is free."""
    with loop_filesystem(request.param, 320 << 20) as system, work_folder() as folder:
        data = Path(system.point) / "data"
        if request.param == "btrfs":
            subprocess.run(["btrfs", "-q", "subvolume", "create", data], check=True)
        else:
            data.mkdir()
        (data / "file").write_text("x" * 10_000)
        scene = Scene(system, folder, None)
        scene.state = Path(system.point) / "state"
        scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\nretention.keep-last = 1\n')
        for _ in range(3):
            assert scene.run("backup", "demo").returncode == 0
        fill(Path(system.point))
        yield scene


def test_prune_works(scene: Scene) -> None:
    ctx = scene.context()
    done = prune(ctx, ctx.config.job("demo"))
    assert (len(done.deleted), done.failures) == (2, ())
    assert scene.states() == ["ready"]
    assert any("No space left" in line for line in scene.lines)


@pytest.mark.parametrize("error", [InUseError("it is mounted"), StorageError("it went wrong")])
def test_what_fails_then_is_told_as_it_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: InUseError | StorageError
) -> None:
    ctx = scene.context()
    oldest = scene.entries()[0].manifest
    backend = ctx.backend(oldest.backend)

    def fail(_ref: SnapshotRef, **_how: object) -> Never:
        raise error

    def fail_all(refs: tuple[SnapshotRef, ...], **_how: object) -> tuple[SnapmgrError, ...]:
        return (error,) * len(refs)

    monkeypatch.setattr(backend, "delete", fail)
    if isinstance(backend, BatchDeleting):
        monkeypatch.setattr(backend, "delete_batch", fail_all)
    with pytest.raises(type(error), match=error.message):
        delete(ctx, oldest)
    assert scene.states() == ["ready"] * 3
    monkeypatch.undo()
    delete(ctx, oldest)
    with suppress(StorageError):
        backup(ctx, ctx.config.job("demo"))
    assert set(scene.states()) == {"ready"}
