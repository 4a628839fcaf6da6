"""How far a replica had executed its sources, as ``show`` and --json say it."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec.structs import replace

from snapmgr.catalog.manifest import Manifest, SourcePosition
from snapmgr.catalog.store import Entry
from snapmgr.cli.documents import details
from snapmgr.cli.show import _lines

MANIFEST = Manifest(
    id="nightly.20260131T023000Z.3f9a2c1b",
    job="nightly",
    source="mysql",
    path="/var/lib/mysql",
    state="ready",
    created_at=datetime(2026, 1, 31, tzinfo=UTC),
    machine_id="m",
)
SOURCES = (
    SourcePosition(channel="west", host="db1", port=3306, gtid="0-1-7"),
    SourcePosition(channel="", host="db2", port=3307, file="binlog.000042", offset=13529),
    SourcePosition(channel="", host="db3", port=3308),
)


def test_each_source_with_what_is_exact_of_it():
    entry = Entry(manifest=replace(MANIFEST, sources=SOURCES), verification=None)
    assert [line for line in _lines(entry, [], []) if line.startswith("executed")] == [
        'executed    of db1:3306 (channel "west") up to GTID 0-1-7',
        "executed    of db2:3307 up to binlog.000042:13529",
        "executed    of db3:3308 up to no exact position",
    ]
    assert details(entry, [], [], [])["sources"] == [
        {"channel": "west", "host": "db1", "port": 3306, "file": None, "offset": None, "gtid": "0-1-7"},
        {"channel": "", "host": "db2", "port": 3307, "file": "binlog.000042", "offset": 13529, "gtid": None},
        {"channel": "", "host": "db3", "port": 3308, "file": None, "offset": None, "gtid": None},
    ]


def test_what_is_no_replica_has_none():
    entry = Entry(manifest=MANIFEST, verification=None)
    assert details(entry, [], [], [])["sources"] == []
    assert not any(line.startswith("executed") for line in _lines(entry, [], []))
