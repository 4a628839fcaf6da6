"""Deleting many snapshots: what is on disk when their storage goes, and what becomes of those that stay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from snapmgr.access import deletion as room
from snapmgr.access.deletion import await_space, delete_all
from snapmgr.catalog.store import Catalog
from snapmgr.config.load import load_config
from snapmgr.context import Context
from snapmgr.contract.errors import CatalogError, InUseError, NoRoomError, NotFoundError, SnapmgrError, StorageError
from support.sample import lease, manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.contract.records import SnapshotRef


class _Storage:
    """A storage that holds everything until it is deleted, and refuses what it is told to."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.batches: list[int] = []
        self.refused: dict[str, SnapmgrError] = {}
        self.look: Callable[[tuple[SnapshotRef, ...]], None] = lambda _refs: None

    def missing(self) -> tuple[()]:
        return ()

    def delete(self, ref: SnapshotRef, *, wait: str = "name") -> None:
        (error,) = self.delete_batch((ref,), wait=wait)
        if error is not None:
            raise error

    def delete_batch(self, refs: tuple[SnapshotRef, ...], *, wait: str = "name") -> tuple[SnapmgrError | None, ...]:
        self.look(refs)
        self.batches.append(len(refs))
        self.gone += [f"{ref.native_id} {wait}" for ref in refs if ref.native_id not in self.refused]
        return tuple(self.refused.get(ref.native_id) for ref in refs)


class _OneByOne(_Storage):
    delete_batch = None  # type: ignore[assignment]

    def delete(self, ref: SnapshotRef, *, wait: str = "name") -> None:
        (error,) = _Storage.delete_batch(self, (ref,), wait=wait)
        if error is not None:
            raise error


@pytest.fixture
def ctx(config: Path, tmp_path: Path) -> Context:
    catalog = Catalog(tmp_path / "state")
    catalog.make()
    for number in range(5):
        catalog.write(manifest(number))
    return Context(config=load_config(config), catalog=catalog, _backends={"reflink": _storage(_Storage())})


def _storage(storage: _Storage) -> Any:
    return storage


def _of(ctx: Context) -> Any:
    return ctx._backends["reflink"]


def _all(ctx: Context) -> list[Manifest]:
    return [entry.manifest for entry in ctx.catalog.entries()[0]]


def _states(ctx: Context) -> list[str]:
    return [one.state for one in _all(ctx)]


def test_a_batch_is_deleting_on_disk_and_locked_while_its_storage_goes_and_forgotten_only_then(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_BATCH", 2)
    looks = []

    def look(refs: tuple[SnapshotRef, ...]) -> None:
        looks.append(_states(Context(config=ctx.config, catalog=Catalog(ctx.catalog.path))))
        for ref in refs:
            with pytest.raises(InUseError, match="is being deleted"), ctx.catalog.reading(ref.snapshot_id):
                pass

    _of(ctx).look = look
    steps = []
    ctx = replace(ctx, progress=lambda *step: steps.append(step))
    for one, error in delete_all(ctx, _all(ctx), doing="pruning"):
        assert error is None
        with pytest.raises(NotFoundError), ctx.catalog.reading(one.id):
            pass
    assert looks == [
        ["deleting", "deleting", "ready", "ready", "ready"],
        ["deleting", "deleting", "ready"],
        ["deleting"],
    ]
    assert _of(ctx).batches == [2, 2, 1]
    assert steps == [("pruning", done, 5) for done in (0, 2, 4)]
    assert _all(ctx) == []


def test_a_storage_without_batches_is_asked_one_by_one(ctx: Context) -> None:
    ctx._backends["reflink"] = _storage(_OneByOne())
    most = []
    _of(ctx).look = lambda _refs: most.append(_states(ctx).count("deleting"))
    assert [error for _, error in delete_all(ctx, _all(ctx))] == [None] * 5
    assert most == [1] * 5
    assert _of(ctx).gone == [f"n{number} name" for number in range(5)]


def test_what_stays_stays_as_it_was_and_does_not_stop_the_others(ctx: Context) -> None:
    leased, pinned, read, used, failed = _all(ctx)
    ctx.catalog.write_lease(lease(leased))
    ctx.catalog.write(replace(pinned, pinned=True))
    _of(ctx).refused = {"n3": InUseError("mounted"), "n4": StorageError("moved")}
    last, gone = manifest(5), manifest(6)
    ctx.catalog.write(last)
    with ctx.catalog.reading(read.id):
        outcomes = list(delete_all(ctx, [leased, pinned, read, used, failed, gone, last]))
    assert [type(error) for _, error in outcomes] == [
        InUseError, InUseError, InUseError, InUseError, StorageError, NotFoundError, type(None),
    ]  # fmt: skip
    assert [one for one, _ in outcomes] == [leased, pinned, read, used, failed, gone, last]
    assert _states(ctx) == ["ready", "ready", "ready", "ready", "deleting"]
    assert _of(ctx).gone == ["n5 name"]
    with ctx.catalog.reading(used.id):
        pass


def test_one_that_must_not_be_deleted_is_not_marked(ctx: Context) -> None:
    def refuse(one: Manifest) -> None:
        if one.number == 0 and one.id.endswith("2"):
            raise StorageError("changed by hand")

    errors = [error for _, error in delete_all(ctx, _all(ctx), refuse=refuse)]
    assert [error.message for error in errors if error is not None] == ["changed by hand"]
    assert _states(ctx) == ["ready"]


def test_of_a_set_whose_first_member_is_in_use_nothing_is_deleted(ctx: Context) -> None:
    sets = []
    for one in _all(ctx)[:3]:
        (member,) = one.members
        second = replace(member, ref=replace(member.ref, native_id=f"{member.ref.native_id}b"))
        sets.append(replace(one, members=(member, second)))
        ctx.catalog.write(sets[-1])
    _of(ctx).refused = {"n0": InUseError("mounted"), "n1b": InUseError("mounted")}
    assert [error is None for _, error in delete_all(ctx, sets)] == [False, False, True]
    assert _of(ctx).gone == ["n1 name", "n2 name", "n2b name"]
    # A part of the second is gone, so that it can only go the rest of the way.
    assert _states(ctx) == ["ready", "deleting", "ready", "ready"]


def test_on_a_full_disk_they_are_deleted_though_that_cannot_be_written(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    ctx = replace(ctx, tell=lines.append)
    first, second, *_ = _all(ctx)
    full = {first.id: NoRoomError("cannot write it: No space left"), second.id: CatalogError("Input/output error")}
    monkeypatch.setattr(ctx.catalog, "write_many", lambda _manifests: full)
    assert [error for _, error in delete_all(ctx, (first, second))] == [None, full[second.id]]
    assert "its state cannot be written" in lines[0]
    # Not marked, so not touched.
    assert _of(ctx).gone == ["n0 name"]
    assert first not in _all(ctx)


def test_a_storage_that_hangs_is_asked_once_and_nothing_is_marked(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def hang(pools: object, _mounts: object) -> None:
        asked.append(pools)
        raise StorageError("it did not answer")

    monkeypatch.setattr(room, "require_pools_answer", hang)
    assert [error is None for _, error in delete_all(ctx, _all(ctx))] == [False] * 5
    assert len(asked) == 1
    assert _states(ctx) == ["ready"] * 5


def test_space_is_awaited_for_all_at_once(ctx: Context) -> None:
    everything = _all(ctx)
    _of(ctx).refused = {"n1": StorageError("not free after 10 min")}
    assert list(await_space(ctx, everything)) == [everything[1].id]
    assert _of(ctx).batches == [5]
    ctx._backends["reflink"] = _storage(_OneByOne())
    assert await_space(ctx, everything) == {}
    assert _of(ctx).gone == [f"n{number} space" for number in range(5)]
