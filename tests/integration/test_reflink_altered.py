"""reflink: a copy that somebody changed is told from one that is as it was taken."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from snapmgr.api import AlteredError
from snapmgr.testing import FolderLab
from snapmgr.testing.lab import new_record
from snapmgr_reflink import ReflinkBackend, ReflinkConfig
from support.btrfs import run
from support.storage import loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.api import SnapshotRef

pytestmark = pytest.mark.needs("root", "loop", "xfs", "btrfs")


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def lab(request: pytest.FixtureRequest) -> Iterator[FolderLab]:
    with loop_filesystem(request.param, 400 << 20) as made:
        yield FolderLab(ReflinkBackend, ReflinkConfig(), made.point)


@pytest.fixture
def ref(lab: FolderLab) -> SnapshotRef:
    origin = lab.make_origin()
    (origin / "a" / "b").mkdir(parents=True)
    (origin / "a" / "b" / "deep").write_text("deep")
    (origin / "future").write_text("from another clock")
    os.utime(origin / "future", (time.time() + 10**8, time.time() + 10**8))
    ref = lab.take_one(origin)
    time.sleep(0.02)  # beyond the kernel's tick, the granularity of its file times
    return ref


def _data(lab: FolderLab, ref: SnapshotRef) -> Path:
    return lab.folder / ".snapmgr-reflink" / ref.name / "data"


@pytest.mark.parametrize("change", ["written", "made", "removed", "renamed", "removed-at-the-top"])
def test_every_change_of_contents_is_seen(lab: FolderLab, ref: SnapshotRef, change: str) -> None:
    data = _data(lab, ref)
    if change == "written":
        with (data / "a" / "b" / "deep").open("r+") as file:
            file.write("D")
    elif change == "made":
        (data / "a" / "new").touch()
    elif change == "removed":
        (data / "a" / "b" / "deep").unlink()
    elif change == "renamed":
        (data / "a" / "b").rename(data / "a" / "c")
    else:
        (data / "future").unlink()
    for writable in (True, False):
        with pytest.raises(AlteredError, match="changed by hand") as caught:
            lab.backend().attach(new_record(ref, writable=writable))
        assert ref.name in caught.value.message
    lab.backend().delete(ref)


def test_what_leaves_the_contents_is_no_change(lab: FolderLab, ref: SnapshotRef) -> None:
    data = _data(lab, ref)
    (data / "a" / "b" / "deep").chmod(0o600)
    os.setxattr(data / "a", "user.label", b"new")
    os.link(data / "future", lab.folder / f"link-{ref.name}")
    data.parent.rename(data.parent.with_name("renamed"))
    with lab.attached(ref, writable=True) as reached:
        assert (reached / "a" / "b" / "deep").read_text() == "deep"
    with lab.attached(ref, writable=True) as reached:
        (reached / "a" / "b" / "deep").write_text("only in the clone")
    with lab.attached(ref, writable=False):
        pass
    run("sync")
    lab.backend().delete(ref)
