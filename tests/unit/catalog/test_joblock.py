"""The mark that a run leaves for the next one: believed only where nothing can have become unfinished since."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.catalog import joblock
from snapmgr.catalog.manifest import UNFINISHED
from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import BusyError
from support.sample import NOW, POOL, manifest

MANY = joblock.WORTH
LOCK = "locks/nightly.lock"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    catalog = Catalog(tmp_path / "state")
    catalog.make()
    catalog.write(manifest(0))
    return catalog.path


def swept(state: Path, count: int = MANY) -> None:
    """Do what a run does that looks at everything and finishes it."""
    catalog = Catalog(state)
    with catalog.job_lock("nightly"):
        catalog.leave_swept("nightly", (POOL,), count)


def believed(state: Path) -> object:
    """Return what the next run is told, and leave things as if it had been killed."""
    content = (state / LOCK).read_bytes() if (state / LOCK).exists() else b""
    status = (state / LOCK).stat() if content else None
    catalog = Catalog(state)
    with catalog.job_lock("nightly"):
        told = catalog.swept_pools("nightly")
    assert status is None or (state / LOCK).stat().st_ino == status.st_ino
    return told


def test_a_run_that_finished_everything_spares_the_next_one_the_look(state: Path) -> None:
    assert believed(state) is None
    swept(state)
    assert believed(state) == (POOL,)
    assert believed(state) is None  # it did not sweep


def test_where_a_look_is_quick_every_run_looks(state: Path) -> None:
    swept(state, MANY - 1)
    assert believed(state) is None
    assert (state / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_run_that_was_killed_leaves_nothing(state: Path) -> None:
    swept(state)
    code = (
        "import os, sys; from pathlib import Path; from snapmgr.catalog.store import Catalog\n"
        "catalog = Catalog(Path(sys.argv[1]))\n"
        "with catalog.job_lock('nightly'):\n"
        "    assert catalog.swept_pools('nightly') is not None\n"
        "    catalog.leave_swept('nightly', (), None)\n"
        "    os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(state)], check=False).returncode == -9
    assert believed(state) is None


@pytest.mark.parametrize("unfinished", UNFINISHED)
@pytest.mark.parametrize("how", ["left", "finished", "forgotten", "raised", "many"])
def test_what_is_unfinished_at_the_end_makes_the_next_run_look(state: Path, unfinished: str, how: str) -> None:
    one = manifest(1, state=unfinished)
    catalog = Catalog(state)
    with suppress(KeyboardInterrupt), catalog.job_lock("nightly"):
        catalog.leave_swept("nightly", (POOL,), MANY)
        catalog.write(one)
        if how == "many":
            assert catalog.write_many([replace(one, state="ready")]) == {}
            assert catalog.write_many([one]) == {}
        if how == "finished":
            catalog.write(replace(one, state="ready"))
        if how == "forgotten":
            catalog.forget(one.id)
        if how == "raised":
            raise KeyboardInterrupt
    assert (believed(state) == (POOL,)) == (how in ("finished", "forgotten"))


@pytest.mark.parametrize("unfinished", UNFINISHED)
def test_the_removal_of_a_mark_is_durable_before_a_snapshot_is_unfinished(
    state: Path, unfinished: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a btrfs that lost its disk, and is mounted again without a boot, has the mark beside the manifest.
    swept(state)
    real, flushed = os.fsync, []

    def fsync(fd: int) -> None:
        flushed.append((Path(f"/proc/self/fd/{fd}").readlink().name, os.pread(fd, 99, 0) if fd in locks else b""))
        real(fd)

    catalog = Catalog(state)
    with catalog.job_lock("nightly"):
        locks = {int(one.name) for one in Path("/proc/self/fd").iterdir() if str(one.resolve()).endswith(LOCK)}
        monkeypatch.setattr(os, "fsync", fsync)
        catalog.write(manifest(1))
        assert all(name != Path(LOCK).name for name, _ in flushed)
        flushed.clear()
        catalog.write_many([manifest(1, state=unfinished)])
        catalog.write(manifest(2, state=unfinished))
    assert flushed[0] == (Path(LOCK).name, f"{os.getpid()}\n".encode())
    assert [name for name, _ in flushed].count(Path(LOCK).name) == 1


def test_the_pools_of_a_new_snapshot_are_known_to_the_next_run(state: Path) -> None:
    other = replace(POOL, id="/elsewhere")
    one = manifest(1)
    ref = replace(one.members[0].ref, pool=other)
    one = replace(one, members=(replace(one.members[0], ref=ref),))
    catalog = Catalog(state)
    with catalog.job_lock("nightly"):
        catalog.leave_swept("nightly", (POOL,), MANY)
        catalog.write(replace(one, state="pending", members=()))
        catalog.write(one)
    assert believed(state) == (POOL, other)


def _after_a_boot(_state: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(joblock, "boot_id", lambda: "another")


def _after_an_hour(_state: Path, patch: pytest.MonkeyPatch) -> None:
    now = joblock._boot_s()
    patch.setattr(joblock, "_boot_s", lambda: now + 3601)


def _all_restored(state: Path, _patch: pytest.MonkeyPatch) -> None:
    time.sleep(0.25)
    copy = state.with_name("copy")
    shutil.copytree(state, copy)
    shutil.rmtree(state)
    shutil.copytree(copy, state)


def _snapshots_restored(state: Path, _patch: pytest.MonkeyPatch) -> None:
    kept = state / "kept"
    shutil.copytree(state / "snapshots", kept)
    shutil.rmtree(state / "snapshots")
    kept.rename(state / "snapshots")


def _snapshots_restored_in_the_same_inode(_state: Path, patch: pytest.MonkeyPatch) -> None:
    # As on ext4, which tells the new folder from the old one by the generation alone.
    real = fcntl.ioctl

    def another(fd: int, request: int, into: bytearray) -> None:
        with suppress(OSError):
            real(fd, request, into)
        into[0] ^= 1

    patch.setattr(fcntl, "ioctl", another)


def _lock_restored_later(state: Path, _patch: pytest.MonkeyPatch) -> None:
    content = (state / LOCK).read_bytes()
    time.sleep(0.25)
    (state / LOCK).write_bytes(content)


def _holder_could_not_remove_it(state: Path, _patch: pytest.MonkeyPatch) -> None:
    # A pid of the same length was written over ours, and truncating failed.
    with (state / LOCK).open("r+b") as file:
        file.write(str(os.getpid() ^ 1).encode())


def _of_others(state: Path, _patch: pytest.MonkeyPatch) -> None:
    (state / LOCK).chmod(0o666)


@pytest.mark.parametrize(
    "change",
    [
        _after_a_boot,
        _after_an_hour,
        _all_restored,
        _snapshots_restored,
        _snapshots_restored_in_the_same_inode,
        _lock_restored_later,
        _holder_could_not_remove_it,
        _of_others,
    ],
)
def test_a_mark_that_may_not_fit_is_not_believed(state: Path, change, monkeypatch: pytest.MonkeyPatch) -> None:
    swept(state)
    with monkeypatch.context() as patch:
        change(state, patch)
        assert believed(state) is None


def test_an_hour_counts_from_the_last_look_not_from_the_last_mark(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept(state)
    start = joblock._boot_s()
    for minutes in (20, 40, 59):
        monkeypatch.setattr(joblock, "_boot_s", lambda minutes=minutes: start + minutes * 60)
        catalog = Catalog(state)
        with catalog.job_lock("nightly"):
            pools = catalog.swept_pools("nightly")
            assert pools is not None
            catalog.leave_swept("nightly", pools, None)
    monkeypatch.setattr(joblock, "_boot_s", lambda: start + 61 * 60)
    assert believed(state) is None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=st.floats(0, 1), flip=st.floats(0, 0.999), bit=st.integers(0, 7), more=st.sampled_from([b"", b"\n{}", b"}"]))
def test_a_damaged_mark_is_an_error_to_nobody(state: Path, cut: float, flip: float, bit: int, more: bytes) -> None:
    swept(state)
    whole = (state / LOCK).read_bytes()
    damaged = bytearray(whole[: round(cut * len(whole))])
    complete = len(damaged) == len(whole) and not more
    if damaged:
        damaged[int(flip * len(damaged))] ^= 1 << bit
    (state / LOCK).write_bytes(damaged + more)
    assert believed(state) is None or complete


def test_who_holds_the_lock_is_named_by_its_pid_alone(state: Path) -> None:
    swept(state)
    with Catalog(state).job_lock("nightly"), pytest.raises(BusyError) as caught, Catalog(state).job_lock("nightly"):
        pass
    assert f"(pid {os.getpid()})" in caught.value.message


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.fixture
def many(state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(joblock, "WORTH", 1)
    return state


def test_numbers_grow_whatever_the_clock_does_and_take_one_look(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Catalog(many).next_number(NOW)
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "summaries", lambda _self, _job=None: pytest.fail("it looked"))
        back = [Catalog(many).next_number(NOW - timedelta(days=number)) for number in range(3)]
        ahead = Catalog(many).next_number(NOW + timedelta(days=9))
    assert back == [first + 1, first + 2, first + 3]
    assert ahead == int((NOW + timedelta(days=9)).timestamp())
    (many / "locks/number").unlink()
    # None of them was used.
    assert Catalog(many).next_number(NOW) == first


def test_an_adopted_snapshot_of_a_higher_number_counts(many: Path) -> None:
    first = Catalog(many).next_number(NOW)
    Catalog(many).write(replace(manifest(3), number=first + 1000))
    assert Catalog(many).next_number(NOW) == first + 1001


@pytest.mark.parametrize("content", [b"", b'{"number": 99', None])
def test_a_restored_manifest_of_a_higher_number_counts(many: Path, content: bytes | None) -> None:
    first = Catalog(many).next_number(NOW)
    lost = replace(manifest(3), number=first + 1000)
    Catalog(many).write(lost)
    path = many / "snapshots" / lost.id / "manifest.json"
    path.unlink()
    if content is not None:
        path.touch(mode=0o600)
        path.write_bytes(content)
    assert Catalog(many).next_number(NOW) == first
    Catalog(many).write(lost)
    assert Catalog(many).next_number(NOW) == first + 1001


def test_without_room_for_the_number_everybody_looks(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def refuse(fd: int, data: bytes, offset: int) -> int:
        if b"written_ns" in data:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    Catalog(many).next_number(NOW)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        number = Catalog(many).next_number(NOW)
        catalog = Catalog(many)
        with catalog.job_lock("nightly"):
            catalog.leave_swept("nightly", (), MANY)
    Catalog(many).write(replace(manifest(3), number=number))
    assert Catalog(many).next_number(NOW) == number + 1
    assert believed(many) is None


def test_jobs_that_begin_together_get_different_numbers(many: Path) -> None:
    Catalog(many).next_number(NOW)
    code = (
        "import sys; from pathlib import Path; from datetime import datetime, UTC\n"
        "from snapmgr.catalog.store import Catalog\n"
        "catalog = Catalog(Path(sys.argv[1]))\n"
        "print(*[catalog.next_number(datetime(2026, 1, 1, tzinfo=UTC)) for _ in range(200)])"
    )
    argv = [sys.executable, "-c", code, str(many)]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    numbers = [int(word) for one in both for word in one.communicate(timeout=60)[0].split()]
    assert len(numbers) == len(set(numbers)) == 400
