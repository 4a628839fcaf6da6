"""Manifests survive the round trip, and damage is always told, never half understood."""

from __future__ import annotations

import string
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.catalog.manifest import (
    Lease,
    Manifest,
    Member,
    Position,
    QuiesceRecord,
    RestoreRecord,
    ServerRecord,
    decode,
    encode,
    new_id,
)
from snapmgr.contract.errors import CatalogError
from snapmgr.contract.records import Intent, Pool, SnapshotRef
from snapmgr.system.host import Process
from support.sample import lease

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)
POOL = Pool(backend="btrfs", id="f00d", hint="/srv")
REF = SnapshotRef(
    backend="btrfs", snapshot_id="nightly.x.1", pool=POOL, volume_id="v", name="nightly.x.1", native_id="u"
)
FULL = Manifest(
    id="nightly.20260301T023000Z.3f9a2c1b",
    job="nightly",
    source="mysql",
    path='/srv/"my\nsql"/ü',
    state="ready",
    created_at=NOW,
    machine_id="m",
    taken_at=NOW,
    proved_at=NOW,
    intents=(Intent(pool=POOL, volume_id="v", name="n"),),
    members=(Member(ref=REF, subpath="data", call_s=0.0018),),
    excluded=("/srv/mysql/nested",),
    helper=Process(pid=1, start_ticks=2, boot_id="b"),
    quiesce=QuiesceRecord(level="backup-lock", why="w", proof="p", attempts=2, waited_s=0.1, held_s=0.004),
    server=ServerRecord(
        flavor="mariadb",
        version="10.11",
        server_id=1,
        server_uuid=None,
        datadir="/srv",
        log_bin="b",
        settings={"a": "1"},
    ),
    position=Position(file="b.000001", offset=4, gtid="0-1-2"),
)


def test_round_trip() -> None:
    assert decode(encode(FULL), Manifest, "x") == FULL


_TEXT = st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=20)
_NAMES = _TEXT.filter(lambda name: name not in (".", ".."))
_BELOW = st.lists(_NAMES, max_size=4).map("/".join)
# Each has a part that leads elsewhere, at any place of it.
_ELSEWHERE = st.tuples(st.lists(_TEXT, max_size=3), st.just([".."]), st.lists(_TEXT, max_size=3)).map(
    lambda parts: "/".join((*parts[0], *parts[1], *parts[2]))
)


@given(_BELOW, _BELOW, _NAMES, st.integers(0, 2**62))
def test_round_trip_of_any_path_and_offset(path: str, subpath: str, name: str, offset: int) -> None:
    member = replace(FULL.members[0], subpath=subpath, path=f"/{path}", places={f"/{path}": subpath})
    manifest = replace(FULL, path=f"/{path}", position=Position(file=name, offset=offset, gtid=""), members=(member,))
    assert decode(encode(manifest), Manifest, "x") == manifest


def _with_ref(**change: Any) -> dict[str, Any]:
    return {"members": (replace(FULL.members[0], ref=replace(REF, **change)),)}


_PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "id": lambda path: {"id": path},
    "job": lambda path: {"job": path},
    "path": lambda path: {"path": f"/{path}"},
    "absent[0]": lambda path: {"absent": (f"/{path}",)},
    "state_dir": lambda path: {"state_dir": f"/{path}"},
    "position.file": lambda path: {"position": replace(FULL.position, file=path)},
    "server.datadir": lambda path: {"server": replace(FULL.server, datadir=f"/{path}")},
    "intents[0].name": lambda path: {"intents": (replace(FULL.intents[0], name=path),)},
    "intents[0].pool.id": lambda path: {"intents": (replace(FULL.intents[0], pool=replace(POOL, id=path)),)},
    "members[0].subpath": lambda path: {"members": (replace(FULL.members[0], subpath=path),)},
    "members[0].path": lambda path: {"members": (replace(FULL.members[0], path=f"/{path}"),)},
    "members[0].places[...]": lambda path: {"members": (replace(FULL.members[0], places={"/srv": path}),)},
    "members[0].places": lambda path: {"members": (replace(FULL.members[0], places={f"/{path}": ""}),)},
    "members[0].ref.name": lambda path: _with_ref(name=path),
    "members[0].ref.snapshot_id": lambda path: _with_ref(snapshot_id=path),
    "members[0].ref.pool.id": lambda path: _with_ref(pool=replace(POOL, id=f"f00d:{path}")),
}


@given(st.sampled_from(sorted(_PLACES)), _ELSEWHERE)
def test_a_path_that_leads_elsewhere_is_refused_wherever_it_is(place: str, path: str) -> None:
    with pytest.raises(CatalogError) as caught:
        decode(encode(replace(FULL, **_PLACES[place](path))), Manifest, "/state/manifest.json")
    assert caught.value.message == f"/state/manifest.json is damaged: {place} is not a name or path that may be there"


@pytest.mark.parametrize("subpath", ["/etc", "a//b", "a/", "./a", "a/.", "."])
def test_a_subpath_is_relative_and_normal(subpath: str) -> None:
    with pytest.raises(CatalogError, match=r"members\[0\].subpath"):
        decode(encode(replace(FULL, members=(replace(FULL.members[0], subpath=subpath),))), Manifest, "x")


def test_a_lease_and_a_restore_name_nothing_elsewhere() -> None:
    held = lease(FULL)
    part = held.parts[0]
    bad = [
        replace(part, subpath="../.."),
        replace(part, folder=".."),
        replace(part, record=replace(part.record, id="../a")),
    ]
    for one in (replace(held, parts=(wrong,)) for wrong in bad):
        with pytest.raises(CatalogError, match="may be there"):
            decode(encode(one), Lease, "x")
    restore = RestoreRecord(
        token="0" * 16,
        snapshot_id="../../etc",
        dest="/srv/new",
        made_dest=True,
        holder=held.holder,
        user="root",
        began_at=NOW,
    )
    with pytest.raises(CatalogError, match="snapshot_id"):
        decode(encode(restore), RestoreRecord, "x")


@given(st.integers(0, len(encode(FULL)) - 1), st.binary(max_size=3))
def test_damage_is_an_error_of_the_catalog_or_another_valid_manifest(place: int, bytes_: bytes) -> None:
    data = encode(FULL)
    damaged = data[:place] + bytes_ + data[place + 1 :]
    try:
        decoded = decode(damaged, Manifest, "/state/manifest.json")
    except CatalogError as error:
        assert "/state/manifest.json" in error.message  # noqa: PT017 - both outcomes are legal
    else:
        assert isinstance(decoded, Manifest)


@given(st.integers(0, len(encode(FULL)) - 2))
def test_truncation_is_always_noticed(length: int) -> None:
    with pytest.raises(CatalogError):
        decode(encode(FULL)[:length], Manifest, "x")


def test_a_newer_schema_is_refused() -> None:
    with pytest.raises(CatalogError, match="schema 2"):
        decode(encode(replace(FULL, schema=2)), Manifest, "x")


def test_ids_are_safe_names_and_differ() -> None:
    ids = {new_id("nightly", NOW) for _ in range(100)}
    assert len(ids) == 100
    assert all(set(one) <= set(string.ascii_letters + string.digits + "._-") for one in ids)
    assert all(one.startswith("nightly.20260301T023000Z.") for one in ids)
