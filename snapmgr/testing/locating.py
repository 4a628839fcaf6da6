"""Tests the contract of registration, `missing`, `locate`, `capabilities` and `headroom`."""

from __future__ import annotations

import os
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import msgspec
import pytest

from snapmgr.api import API_VERSION, Capabilities, NotMine, Pool, Reservoir, StorageError
from snapmgr.testing.lab import Contract, Lab
from snapmgr.testing.trees import fingerprint, plant, same


class _Forbidden:
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - it returns nothing
        raise AssertionError(f"the constructor must touch nothing, and asked for .{name}")


class LocatingContract(Contract):
    """The contract before a snapshot is taken."""

    def test_name_and_version(self, lab: Lab) -> None:
        """A backend has a lower-case name and the version of the interface it was written for."""
        assert re.fullmatch(r"[a-z][a-z0-9_-]*", lab.backend_class.name), "the name is that of the entry point"
        assert lab.backend_class.api_version == API_VERSION

    def test_config_has_defaults_is_typed_and_frozen(self, lab: Lab) -> None:
        """``[backend.NAME]`` may be missing, unknown keys are refused, and the configuration is immutable."""
        kind = lab.backend_class.Config
        default = msgspec.convert({}, kind)
        names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind.__struct_fields__)
        for name in names:
            with pytest.raises((FrozenInstanceError, AttributeError)):
                setattr(default, name, getattr(default, name))

    def test_constructor_touches_nothing(self, lab: Lab) -> None:
        """Constructing does nothing else, as `snapmgr list` constructs backends that it never uses."""
        forbidden: Any = _Forbidden()
        lab.backend_class(lab.config, forbidden, forbidden)

    def test_missing_is_empty_here(self, lab: Lab) -> None:
        """On a machine where the backend works it misses no requirement, also when asked again."""
        backend = lab.backend()
        assert backend.missing() == ()
        assert backend.missing() == ()

    def test_volume_names_its_parts(self, lab: Lab) -> None:
        """A located volume belongs to this backend, and its path and subpath lead to the target."""
        origin = lab.make_origin()
        volume = lab.volume(origin)
        assert volume.backend == lab.backend_class.name
        assert volume.pool.backend == lab.backend_class.name
        assert volume.id
        assert volume.pool.id
        assert not volume.subpath.startswith("/")
        assert os.path.samefile(os.path.join(volume.path, volume.subpath), origin)

    def test_volume_is_the_same_each_time(self, lab: Lab) -> None:
        """Ids are the storage's own: the same for another instance or content, different for another origin."""
        origin, other = lab.make_origin(), lab.make_origin()
        before = lab.volume(origin)
        plant(origin)
        assert lab.volume(origin) == before
        elsewhere = lab.volume(other)
        assert (elsewhere.id, elsewhere.subpath) != (before.id, before.subpath)

    def test_locate_changes_nothing(self, lab: Lab) -> None:
        """`locate` changes neither the target's files nor the pool."""
        origin = lab.make_origin()
        plant(origin)
        lab.take_one(origin)
        pool = lab.volume(origin).pool
        files, things = fingerprint(origin), lab.found(pool)
        lab.volume(origin)
        same(files, fingerprint(origin))
        assert lab.found(pool) == things

    def test_locate_makes_no_pool(self, lab: Lab) -> None:
        """`locate` does not create the place for snapshots either."""
        pool = lab.volume(lab.make_origin()).pool
        assert not os.path.isdir(pool.id) or os.listdir(pool.id), f"{pool.id} is empty: locate seems to have made it"

    def test_foreign_target_is_refused_with_a_reason(self, lab: Lab) -> None:
        """A target on other storage is not an error, but gets an understandable answer."""
        foreign = lab.foreign()
        if foreign is None:
            pytest.skip("this backend takes any directory")
        located = lab.backend().locate(lab.target(foreign))
        assert isinstance(located, NotMine)
        assert len(located.reason) > len("no")
        assert located.foreign, "NotMine.foreign is not set: users would see this reason beside a nearer backend's"

    def test_nested_mount_is_named_and_left_out(self, lab: Lab) -> None:
        """A mount below the target is in `excluded`, and an empty folder in the snapshot."""
        origin = lab.make_origin()
        folder = origin / "nested"
        folder.mkdir()
        (origin / "beside").write_bytes(b"is kept")
        nested = lab.nest(folder)
        if nested is None:
            pytest.skip("this user may not mount anything")
        with nested:
            (folder / "not-ours").write_bytes(b"is on another file system")
            assert str(folder) in lab.volume(origin).excluded
            ref = lab.take_one(origin)
            with lab.attached(ref, writable=False) as volume:
                inside = lab.inside(volume, origin)
                assert sorted(os.listdir(inside)) == ["beside", "nested"]
                assert os.listdir(inside / "nested") == []

    def test_capabilities(self, lab: Lab) -> None:
        """Capabilities have allowed values, the same for one volume and for two of the same kind."""
        volumes = (lab.volume(lab.make_origin()), lab.volume(lab.make_origin()))
        one = lab.backend().capabilities(volumes[:1])
        assert isinstance(one, Capabilities)
        assert one.atomicity in {"file", "volume"}
        assert one.clone in {"native", "scratch", "none"}
        assert isinstance(one.survives_origin, bool)
        assert lab.backend().capabilities(volumes[:1]) == one
        assert lab.backend().capabilities(volumes).atomicity in {"file", one.atomicity}

    def test_headroom(self, lab: Lab) -> None:
        """Reservoirs have a name and a size, before and after the first snapshot."""
        origin = lab.make_origin()
        volume = lab.volume(origin)
        for _ in range(2):
            reservoirs = lab.backend().headroom(volume)
            for reservoir in reservoirs:
                assert isinstance(reservoir, Reservoir)
                assert reservoir.name
                assert 0 <= reservoir.used_bytes <= reservoir.size_bytes
                assert reservoir.when_full in {"snapshot_lost", "origin_errors", "no_snapshots", "no_growth"}
                assert reservoir.wanted_bytes >= 0
            lab.take_one(origin)

    def test_no_pools_no_things(self, lab: Lab) -> None:
        """The inventory of no pools is empty."""
        assert lab.backend().inventory(()) == ()

    def test_unreachable_pool_is_an_error(self, lab: Lab) -> None:
        """Unreachable storage is not empty storage; otherwise its snapshots would be forgotten."""
        origin = lab.make_origin()
        ref = lab.take_one(origin)
        with lab.unreachable(ref.pool), pytest.raises(StorageError):
            lab.found(ref.pool)
        assert [found.ref for found in lab.found(ref.pool) if found.snapshot_id == ref.snapshot_id] == [ref]

    def test_unknown_pool_is_an_error(self, lab: Lab) -> None:
        """Neither is a pool that never existed."""
        pool = lab.volume(lab.make_origin()).pool
        unknown = Pool(backend=pool.backend, id=f"{pool.id}-no-such-pool", hint="/nowhere")
        with pytest.raises(StorageError):
            lab.found(unknown)
