"""The suite itself: each of these broken backends must fail the test that is about what it breaks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.outcomes import Failed
from msgspec.structs import replace

from snapmgr.api import Capabilities, NotFoundError, StorageError, Usage
from snapmgr.testing import BackendContract as Suite
from snapmgr.testing import FolderLab
from snapmgr_reflink import ReflinkBackend, ReflinkConfig
from support.storage import loop_filesystem

if TYPE_CHECKING:
    from collections.abc import Iterator


class _PromisesAnInstant(ReflinkBackend):
    def capabilities(self, volumes):  # noqa: ARG002
        return Capabilities(atomicity="volume", clone="native", survives_origin=True)


class _DeletesByName(ReflinkBackend):
    def delete(self, ref, *, wait="name"):  # noqa: ARG002
        shutil.rmtree(Path(ref.pool.id, ref.name), ignore_errors=True)


class _ForgetsUnreachable(ReflinkBackend):
    def inventory(self, pools, *, notes=True):
        try:
            return super().inventory(pools, notes=notes)
        except StorageError:
            return ()


class _HandsOutTheOriginal(ReflinkBackend):
    def attach(self, record):
        super().attach(record)
        return super().attach(replace(record, id="0" * 16, writable=False))

    def detach(self, record):
        super().detach(record)
        super().detach(replace(record, id="0" * 16))


class _LeavesTheArmed(ReflinkBackend):
    def arm(self, volumes, snapshot_id):
        armed = super().arm(volumes, snapshot_id)
        armed.launched = True
        return armed


class _HidesDebris(ReflinkBackend):
    def inventory(self, pools, *, notes=True):
        found = super().inventory(pools, notes=notes)
        return tuple(replace(one, kind="snapshot", ref=None) for one in found)


class _LosesNotes(ReflinkBackend):
    def annotate(self, ref, note):
        super().annotate(ref, note[:4096])


class _ListsNothingWithoutNotes(ReflinkBackend):
    def inventory(self, pools, *, notes=True):
        return super().inventory(pools) if notes else ()


class _KnowsNoUsage(ReflinkBackend):
    def usage(self, ref, *, exact=False):
        try:
            return super().usage(ref, exact=exact)
        except NotFoundError:
            return Usage(exclusive_bytes=0)


class _CreatesWhileLooking(ReflinkBackend):
    def locate(self, target):
        volume = super().locate(target)
        Path(volume.pool.id).mkdir(exist_ok=True, mode=0o700)
        return volume


class _RemembersItsSnapshots(ReflinkBackend):
    _known: frozenset[str] = frozenset()

    def settle(self, refs, timeout_s):
        super().settle(refs, timeout_s)
        self._known |= {ref.name for ref in refs}

    def inventory(self, pools, *, notes=True):
        return tuple(found for found in super().inventory(pools, notes=notes) if found.name in self._known)


class _DeletesWhatIsInUse(ReflinkBackend):
    def _refuse_attached(self, store, ref):
        pass


class _Lab(FolderLab):
    kind = ReflinkBackend

    def __init__(self, folder: Path) -> None:
        super().__init__(self.kind, ReflinkConfig(store=str(folder / "copies"), allow_plain_copy=True), folder)


_BROKEN = (
    (_DeletesByName, "test_impostor_survives"),
    (_DeletesByName, "test_delete_with_another_native_id"),
    (_DeletesByName, "test_delete_what_is_attached"),
    (_ForgetsUnreachable, "test_unreachable_pool_is_an_error"),
    (_HandsOutTheOriginal, "test_writable_clone_changes_nothing_else"),
    (_LeavesTheArmed, "test_leaving_unfired_undoes"),
    (_HidesDebris, "test_killed_while_armed"),
    (_LosesNotes, "test_notes_come_back"),
    (_ListsNothingWithoutNotes, "test_notes_come_back"),
    (_KnowsNoUsage, "test_usage_of_what_is_gone"),
    (_CreatesWhileLooking, "test_locate_makes_no_pool"),
    (_RemembersItsSnapshots, "test_inventory_is_complete"),
    (_DeletesWhatIsInUse, "test_delete_what_is_attached"),
)


@pytest.mark.parametrize(
    ("kind", "test"), _BROKEN, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_a_broken_backend_fails(tmp_path: Path, kind: type[ReflinkBackend], test: str) -> None:
    lab = type("_BrokenLab", (_Lab,), {"kind": kind})(tmp_path)
    with pytest.raises((AssertionError, Failed, StorageError)):
        getattr(Suite(), test)(lab)


@pytest.mark.parametrize("test", sorted({test for _, test in _BROKEN}))
def test_a_sound_backend_passes_the_same(tmp_path: Path, test: str) -> None:
    getattr(Suite(), test)(_Lab(tmp_path))


@pytest.fixture(scope="module")
def xfs() -> Iterator[Path]:
    with loop_filesystem("xfs", 600 << 20) as made:
        yield made.point


@pytest.mark.needs("root", "loop", "xfs")
def test_a_promised_instant_that_is_none_is_caught(xfs: Path) -> None:
    lab = FolderLab(_PromisesAnInstant, ReflinkConfig(), xfs)
    with pytest.raises(AssertionError, match="the second file is ahead"):
        Suite().test_one_instant_if_promised(lab)
