"""Manifests survive the round trip, and damage is always told, never half understood."""

from __future__ import annotations

import string
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.catalog.manifest import Manifest, Member, Position, QuiesceRecord, ServerRecord, decode, encode, new_id
from snapmgr.contract.errors import CatalogError
from snapmgr.contract.records import Intent, Pool, SnapshotRef
from snapmgr.system.host import Process

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


@given(
    st.text(st.characters(exclude_characters="\0"), max_size=40).filter(
        lambda text: text.isprintable() or "\n" in text
    ),
    st.integers(0, 2**62),
)
def test_round_trip_of_any_path_and_offset(path: str, offset: int) -> None:
    manifest = replace(FULL, path=path, position=Position(file=path, offset=offset, gtid=""))
    assert decode(encode(manifest), Manifest, "x") == manifest


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
