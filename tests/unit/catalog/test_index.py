"""The index: it saves reading manifests, and whatever happens to it or to them, it says what they say."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from msgspec.structs import replace

from snapmgr.catalog import index
from snapmgr.catalog.manifest import Manifest, Verification, encode
from snapmgr.catalog.store import Catalog
from snapmgr.catalog.summary import summarize
from snapmgr.contract.errors import MissingRequirementError, NotFoundError, SnapmgrError
from support.sample import NOW, manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = index.WORTH + 8


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files count as unchanged at once: what is tested does not happen within a tick of the clock."""
    monkeypatch.setattr(index, "_SETTLED_NS", -(10**9))


@pytest.fixture
def catalog(tmp_path: Path, settled: None) -> Catalog:  # noqa: ARG001 - before the catalog is read
    return filled(tmp_path / "state")


def numbered(number: int, order: int, **fields: object) -> Manifest:
    return replace(manifest(number, **fields), number=order)


def filled(path: Path, count: int = MANY) -> Catalog:
    """Return a catalog of `count` snapshots, whose files were written as `Catalog.write` does but not synced."""
    catalog = Catalog(path)
    catalog.make()
    for number in range(count):
        put(catalog, numbered(number, number))
    return catalog


def put(catalog: Catalog, one: Manifest) -> Path:
    folder = catalog.path / "snapshots" / one.id
    folder.mkdir(mode=0o700, exist_ok=True)
    fresh = folder / ".fresh"
    fresh.write_bytes(encode(one))
    return fresh.rename(folder / "manifest.json")


def told(path: Path) -> tuple[list[object], set[tuple[Path, str]]]:
    """Return what a new process would be told by the index."""
    found, damaged = Catalog(path).summaries()
    return list(found), {(one.path, one.problem) for one in damaged}


def truth(path: Path) -> tuple[list[object], set[tuple[Path, str]]]:
    entries, damaged = Catalog(path).entries()
    return [summarize(entry) for entry in entries], {(one.path, one.problem) for one in damaged}


@contextmanager
def reading_nothing(monkeypatch: pytest.MonkeyPatch, allowed: set[str] = frozenset()) -> Iterator[None]:
    """Fail if a manifest is read, but those of `allowed` ids."""
    real = Catalog._load

    def refuse(self: Catalog, snapshot_id: str) -> object:
        assert snapshot_id in allowed
        return real(self, snapshot_id)

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "_load", refuse)
        yield


def test_with_an_index_no_manifest_is_read(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = truth(catalog.path)
    assert told(catalog.path) == expected
    with reading_nothing(monkeypatch):
        assert told(catalog.path) == expected
        assert [one.id for one in Catalog(catalog.path).summaries("nightly")[0]] == [one.id for one in expected[0]]
        assert Catalog(catalog.path).summaries("night") == ([], [])
    assert len(expected[0]) == MANY


def test_only_what_changed_is_read(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    told(catalog.path)
    changed, verified = numbered(3, 3, state="broken", reason="why"), manifest(5)
    catalog.write(changed)
    catalog.write_verification(verified.id, Verification(at=NOW, result="failed", duration_s=1))
    with reading_nothing(monkeypatch, {changed.id, verified.id}):
        found = {one.id: one for one in Catalog(catalog.path).summaries()[0]}
    assert (found[changed.id].state, found[changed.id].reason) == ("broken", "why")
    assert found[verified.id].failed


def test_the_newest_is_found_without_asking_for_the_older_ones(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(catalog.path)
    asked: list[str] = []
    real = index._stamps
    monkeypatch.setattr(index, "_stamps", lambda name, fd: asked.append(name) or real(name, fd))
    with reading_nothing(monkeypatch, {manifest(MANY - 1).id}):
        assert Catalog(catalog.path).resolve("latest").manifest.id == manifest(MANY - 1).id
    assert asked == [manifest(MANY - 1).id]


def _becomes_broken(catalog: Catalog) -> None:
    put(catalog, numbered(MANY - 1, MANY - 1, state="broken"))


def _fails(catalog: Catalog) -> None:
    catalog.write_verification(manifest(MANY - 1).id, Verification(at=NOW, result="failed", duration_s=1))


def _is_removed(catalog: Catalog) -> None:
    catalog.forget(manifest(MANY - 1).id)


def _is_damaged(catalog: Catalog) -> None:
    (catalog.path / "snapshots" / manifest(MANY - 1).id / "manifest.json").write_bytes(b"{")


def _has_successors(catalog: Catalog) -> None:
    put(catalog, numbered(MANY, MANY))
    put(catalog, numbered(MANY + 1, MANY + 1, state="pending"))


def _an_older_one_is_ready_again(catalog: Catalog) -> None:
    put(catalog, numbered(MANY - 1, MANY - 1, state="broken"))
    put(catalog, numbered(MANY - 2, MANY - 2, state="broken"))
    told(catalog.path)
    put(catalog, numbered(MANY - 2, MANY - 2))


def _another_is_verified(catalog: Catalog) -> None:
    catalog.write_verification(manifest(9).id, Verification(at=NOW, result="passed", duration_s=1))


@pytest.mark.parametrize(
    "change",
    [
        _becomes_broken,
        _fails,
        _is_removed,
        _is_damaged,
        _has_successors,
        _an_older_one_is_ready_again,
        _another_is_verified,
    ],
)
@pytest.mark.parametrize("name", ["latest", "latest-verified", "nightly@latest"])
def test_the_newest_is_the_same_as_without_an_index(catalog: Catalog, change, name: str) -> None:
    catalog.write_verification(manifest(5).id, Verification(at=NOW, result="passed", duration_s=1))
    told(catalog.path)
    seen = Catalog(catalog.path)
    seen.resolve(name)
    change(catalog)
    answers = [Catalog(catalog.path).resolve(name).manifest.id, seen.resolve(name).manifest.id]
    (catalog.path / "index").unlink(missing_ok=True)
    assert answers == [Catalog(catalog.path).resolve(name).manifest.id] * 2


def test_few_snapshots_need_no_index(tmp_path: Path, settled: None) -> None:  # noqa: ARG001
    catalog = filled(tmp_path / "state", index.WORTH - 1)
    assert told(catalog.path) == truth(catalog.path)
    assert not (catalog.path / "index").exists()


def test_few_snapshots_are_read_once_in_a_command(
    tmp_path: Path,
    settled: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = filled(tmp_path / "state", 5)
    expected = truth(seen.path)[0]
    assert list(seen.summaries()[0]) == expected
    with reading_nothing(monkeypatch):
        assert list(seen.summaries()[0]) == expected
        assert [one.id for one in seen.summaries("nightly")[0]] == [manifest(number).id for number in range(5)]
    changed = numbered(3, 3, state="broken", reason="why")
    put(seen, changed)
    seen.forget(manifest(1).id)
    seen.write_verification(manifest(2).id, Verification(at=NOW, result="failed", duration_s=1))
    with reading_nothing(monkeypatch, {changed.id, manifest(2).id}):
        found = seen.summaries()[0]
    assert list(found) == truth(seen.path)[0]
    assert [(one.state, one.result) for one in found] == [
        ("ready", None),
        ("ready", "failed"),
        ("broken", None),
        ("ready", None),
    ]


def test_what_a_commands_looks_read_adds_up_until_it_is_worth_an_index(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(catalog.path)
    old = (catalog.path / "index").read_bytes()
    seen = Catalog(catalog.path)
    seen.summaries()
    for number in range(index.WORTH + 2):
        put(catalog, numbered(number, number, pinned=True))
        if number == index.WORTH // 2:
            # Read by one look, and gone before the index is written.
            seen.summaries()
            assert (catalog.path / "index").read_bytes() == old
            shutil.rmtree(catalog.path / "snapshots" / manifest(0).id)
    seen.summaries()
    expected = truth(catalog.path)
    with reading_nothing(monkeypatch):
        assert told(catalog.path) == expected


def test_what_was_just_written_is_read_again(tmp_path: Path) -> None:
    # Within a tick of the clock a file can change and keep its change time.
    catalog = filled(tmp_path / "state")
    told(catalog.path)
    assert not (catalog.path / "index").exists()


def test_a_change_time_of_the_future_is_not_believed(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    # As after a clock was set back.
    monkeypatch.setattr(index, "_SETTLED_NS", 3 * 10**9)
    monkeypatch.setattr(time, "time_ns", lambda: int(NOW.timestamp()) * 10**9)
    told(catalog.path)
    assert not (catalog.path / "index").exists()


def _edited_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b'"state": "ready"', b'"state": "broken"'))
        file.truncate()


def _of_the_same_size_and_times(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b'"number": 7', b'"number": 9'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def _restored_with_its_times(path: Path) -> None:
    copy = path.parent.parent.parent / "copy"
    shutil.copytree(path.parent, copy)
    (copy / "manifest.json").write_bytes(path.read_bytes().replace(b'"number": 7', b'"number": 8'))
    shutil.rmtree(path.parent)
    copy.rename(path.parent)


def _made_a_symlink(path: Path) -> None:
    moved = path.parent.parent.parent / "moved"
    path.parent.rename(moved)
    path.parent.symlink_to(moved)


def _verification_made_a_symlink(path: Path) -> None:
    (path.parent / "verified.json").symlink_to("/nowhere")


def _verification_by_hand(path: Path) -> None:
    (path.parent / "verified.json").write_bytes(encode(Verification(at=NOW, result="passed", duration_s=1)))


def _given_to_others(path: Path) -> None:
    path.chmod(0o666)


def _manifest_removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "change",
    [
        _edited_in_place,
        _of_the_same_size_and_times,
        _restored_with_its_times,
        _made_a_symlink,
        _verification_made_a_symlink,
        _verification_by_hand,
        _given_to_others,
        _manifest_removed,
    ],
)
def test_what_somebody_did_by_hand_is_noticed(catalog: Catalog, change) -> None:
    before = told(catalog.path)
    change(catalog.path / "snapshots" / manifest(7).id / "manifest.json")
    expected = truth(catalog.path)
    assert expected != before
    assert told(catalog.path) == expected


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _of_a_newer_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(index._MAGIC, b"snapmgr index 9.9\n"))


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _of_others(path: Path) -> None:
    path.chmod(0o666)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _valid_sum_over_nonsense(path: Path) -> None:
    for rows in (b"\xc1", b"\x91\x92\x01\x02", b"\x80", b"\x91\xa1\xff"):
        path.write_bytes(index._MAGIC + index._sum(rows) + rows)


DAMAGES = [_cut_short, _one_bit, _of_a_newer_version, _a_folder, _a_pipe, _of_others, _empty]
DAMAGES += [_valid_sum_over_nonsense, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_costs_time_only(catalog: Catalog, damage, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = told(catalog.path)
    path = catalog.path / "index"
    damage(path)
    left = path.lstat().st_mode if path.exists() else None
    assert told(catalog.path) == expected
    if damage in (_a_folder, _a_pipe, _of_others):
        assert path.lstat().st_mode == left  # it is somebody's
    else:
        with reading_nothing(monkeypatch):
            assert told(catalog.path) == expected


def test_an_old_index_is_brought_up_to_date(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    told(catalog.path)
    old = (catalog.path / "index").read_bytes()
    for number in range(index.WORTH):
        put(catalog, numbered(number, MANY - number, pinned=True))
        shutil.rmtree(catalog.path / "snapshots" / manifest(MANY - 1).id, ignore_errors=True)
    expected = truth(catalog.path)
    assert told(catalog.path) == expected
    (catalog.path / "index").write_bytes(old)
    assert told(catalog.path) == expected
    with reading_nothing(monkeypatch):
        assert told(catalog.path) == expected


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_without_the_room_or_right_to_write_it_nothing_fails(
    catalog: Catalog, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path, flags, *more, **named):
        if flags & os.O_RDWR and Path(path).name == "index":
            raise OSError(code, os.strerror(code))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert told(catalog.path) == truth(catalog.path)
    assert not (catalog.path / "index").exists()


def test_an_index_that_another_process_writes_is_left_to_it(catalog: Catalog) -> None:
    told(catalog.path)
    path = catalog.path / "index"
    path.write_bytes(path.read_bytes()[:-1])
    half = path.read_bytes()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert told(catalog.path) == truth(catalog.path)
        assert path.read_bytes() == half
    told(catalog.path)
    assert path.read_bytes() != half


def test_killed_at_any_byte_of_writing_it_the_next_one_sees_that(catalog: Catalog) -> None:
    told(catalog.path)
    path = catalog.path / "index"
    old = path.read_bytes()
    for number in range(index.WORTH):
        put(catalog, numbered(number, number, pinned=True))
    expected = told(catalog.path)
    new = path.read_bytes()
    assert new != old
    for cut in (*range(40), *range(40, len(new), 1009), len(new)):
        # Written in place: the beginning is new, the rest is still the old one.
        path.write_bytes(new[:cut] + old[cut:])
        assert told(catalog.path) == expected


def test_two_at_once_never_see_half_of_it(catalog: Catalog) -> None:
    """Processes that change manifests and remove, cut and rebuild the index beside one that looks."""
    body = """
import os, sys, time
from pathlib import Path
from snapmgr.catalog import index
from snapmgr.catalog.store import Catalog
index._SETTLED_NS, index.WORTH = -10**9, 1
path, end = Path(sys.argv[1]), time.monotonic() + 2
while time.monotonic() < end:
    names = [one.id for one in Catalog(path).summaries()[0]]
    assert len(names) == int(sys.argv[2]), len(names)
    one = Catalog(path).load(names[os.getpid() % len(names)])
    Catalog(path).write(one.manifest)
    assert len(Catalog(path).summaries()[1]) == 0
    if os.urandom(1)[0] < 60:
        os.truncate(path / "index", os.urandom(1)[0] * 40)
"""
    told(catalog.path)
    argv = [sys.executable, "-c", body, str(catalog.path), str(MANY)]
    both = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for one in both:
        assert one.communicate(timeout=60)[1] == ""
        assert one.returncode == 0
    assert told(catalog.path) == truth(catalog.path)


@pytest.mark.needs("root")
def test_somebody_without_the_right_to_read_is_told_so(catalog: Catalog) -> None:
    told(catalog.path)
    catalog.path.chmod(0o711)
    for above in catalog.path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        os.setuid(65534)
        try:
            Catalog(catalog.path).summaries()
        except MissingRequirementError:
            os._exit(0)
        except SnapmgrError:
            os._exit(2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.needs("root")
def test_root_leaves_no_index_where_it_would_be_in_the_way_of_the_owner(catalog: Catalog) -> None:
    for path in (catalog.path, *catalog.path.rglob("*")):
        os.chown(path, 65534, 65534)
    index.Index(catalog.path / "index", catalog.path / "snapshots", catalog._load)._write({})
    assert not (catalog.path / "index").exists()


def newest_of(catalog: Catalog, name: str) -> str | None:
    try:
        return catalog.resolve(name).manifest.id
    except NotFoundError:
        return None


def _next_tick() -> None:
    """Wait until a change has another change time, also on kernels that take it from the clock's ticks."""
    time.sleep(0.011)


class Life(RuleBasedStateMachine):
    """Anything that we, somebody by hand, or a crash may do, in any order; the index says what the manifests say."""

    folder: Path
    numbers = st.integers(0, 11)

    @initialize()
    def begin(self) -> None:
        self.path = Path(os.environ["SNAPMGR_TEST_STATE"]) / os.urandom(8).hex()
        self.catalog = filled(self.path, 8)
        self.old = b""

    @property
    def index(self) -> Path:
        return self.path / "index"

    @rule(number=numbers, state=st.sampled_from(["pending", "ready", "deleting", "broken"]), order=st.integers(0, 5))
    def write(self, number, state, order) -> None:
        put(self.catalog, numbered(number, order, state=state))

    @rule(number=numbers, result=st.sampled_from(["passed", "partly", "failed"]))
    def verify(self, number, result) -> None:
        path = self.path / "snapshots" / manifest(number).id / "verified.json"
        if path.parent.exists():
            _next_tick()
            path.write_bytes(encode(Verification(at=NOW, result=result, duration_s=1)))

    @rule(number=numbers, name=st.sampled_from(["manifest.json", "verified.json"]))
    def lose(self, number, name) -> None:
        (self.path / "snapshots" / manifest(number).id / name).unlink(missing_ok=True)

    @rule(number=numbers)
    def forget(self, number) -> None:
        self.catalog.forget(manifest(number).id)

    @rule(number=numbers, at=st.integers(0, 400), name=st.sampled_from(["manifest.json", "verified.json"]))
    def damage(self, number, at, name) -> None:
        path = self.path / "snapshots" / manifest(number).id / name
        if path.exists():
            _next_tick()
            data = bytearray(path.read_bytes())
            if data:
                data[at % len(data)] ^= 1
            path.write_bytes(data)

    @rule(number=numbers, other=numbers)
    def copy(self, number, other) -> None:
        one, another = (self.path / "snapshots" / manifest(of).id / "manifest.json" for of in (number, other))
        if one.exists() and another.parent.exists() and one != another:
            _next_tick()
            shutil.copy2(one, another)

    @rule()
    def restore_all(self) -> None:
        kept = self.path / "kept"
        shutil.copytree(self.path / "snapshots", kept)
        shutil.rmtree(self.path / "snapshots")
        kept.rename(self.path / "snapshots")

    @rule(cut=st.integers(0, 4000), bit=st.booleans())
    def damage_index(self, cut, bit) -> None:
        if self.index.exists():
            data = bytearray(self.index.read_bytes())
            if bit and data:
                data[cut % len(data)] ^= 1
            self.index.write_bytes(data if bit else data[:cut])

    @rule()
    def keep_index(self) -> None:
        self.old = self.index.read_bytes() if self.index.exists() else b""

    @rule()
    def put_back_old_index(self) -> None:
        self.index.write_bytes(self.old)

    @rule()
    def lose_index(self) -> None:
        self.index.unlink(missing_ok=True)

    @rule()
    def look(self) -> None:
        assert told(self.path) == truth(self.path)
        for name in ("latest", "latest-verified"):
            assert newest_of(Catalog(self.path), name) == newest_of(self.catalog, name) == self.newest(name)
        # One that has looked before, as within one command.
        found, damaged = self.catalog.summaries()
        assert (list(found), {(one.path, one.problem) for one in damaged}) == truth(self.path)

    def newest(self, name: str) -> str | None:
        """Return what `name` means, from the manifests alone."""
        ready = [entry for entry in self.catalog.entries()[0] if entry.manifest.state == "ready"]
        fitting = [one for one in ready if (one.verified if name == "latest-verified" else not one.failed)]
        return fitting[-1].manifest.id if fitting else None

    def teardown(self) -> None:
        self.look()
        shutil.rmtree(self.path)


def test_any_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMGR_TEST_STATE", str(tmp_path))
    monkeypatch.setattr(index, "_SETTLED_NS", -(10**9))
    monkeypatch.setattr(index, "WORTH", 1)
    case = Life.TestCase()
    case.settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case.runTest()
