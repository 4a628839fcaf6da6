"""Manifests and leases as a catalog holds them, and servers' abilities, for tests that need neither behind them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from snapmgr.catalog.manifest import Lease, LeasePart, Manifest, Member, Position, QuiesceRecord, ServerRecord
from snapmgr.contract.records import AttachRecord, Intent, Pool, SnapshotRef
from snapmgr.mysql.connect.abilities import Abilities
from snapmgr.system.host import Process

NOW = datetime(2026, 1, 31, 2, 30, tzinfo=UTC)
POOL = Pool(backend="reflink", id="/nowhere/snapshots", hint="/nowhere/snapshots")


def manifest(number: int = 0, *, job: str = "nightly", **fields: Any) -> Manifest:
    """Return a READY manifest, taken `number` hours after NOW, with `fields` instead of the usual."""
    at = NOW + timedelta(hours=number)
    snapshot_id = f"{job}.{at:%Y%m%dT%H%M%SZ}.{number:08x}"
    ref = SnapshotRef(
        backend="reflink", snapshot_id=snapshot_id, pool=POOL, volume_id="v", name=snapshot_id, native_id=f"n{number}"
    )
    values: dict[str, Any] = {
        "id": snapshot_id,
        "job": job,
        "source": "mysql",
        "path": "/srv/mysql",
        "state": "ready",
        "created_at": at,
        "taken_at": at,
        "proved_at": at,
        "machine_id": "m",
        "intents": (Intent(pool=POOL, volume_id="v", name=snapshot_id),),
        "members": (Member(ref=ref, subpath="data", call_s=0.002),),
        "quiesce": QuiesceRecord(
            level="backup-lock", why="auto", proof="it answered", attempts=1, waited_s=0.0031, held_s=0.0042
        ),
        "server": ServerRecord(
            flavor="mariadb",
            version="10.11.6",
            server_id=1,
            server_uuid=None,
            datadir="/srv/mysql",
            log_bin="binlog",
            settings={"innodb_page_size": "16384"},
        ),
        "position": Position(file="binlog.000001", offset=325, gtid="0-1-7"),
    }
    return Manifest(**(values | fields))


def lease(of: Manifest) -> Lease:
    """Return a lease of it, from before the last boot."""
    record = AttachRecord(id="0123456789abcdef", ref=of.members[0].ref, writable=True, boot_id="another")
    process = Process(pid=1, start_ticks=1, boot_id="another")
    return Lease(
        parts=(LeasePart(record=record, subpath="data"),),
        holder=process,
        user="root",
        why="mount",
        created_at=NOW,
        until=NOW,
        point="/mnt/look",
    )


def abilities_of(flavor: Literal["mariadb", "mysql"], **fields: Any) -> Abilities:
    """Return what a present server of the flavor can do, with `fields` instead of the usual."""
    mariadb = flavor == "mariadb"
    values: dict[str, Any] = {
        "flavor": flavor,
        "backup_stages": mariadb,
        "instance_lock": not mariadb,
        "statement_time": mariadb,
        "binlog": True,
        "binlog_status": "SHOW MASTER STATUS" if mariadb else "SHOW BINARY LOG STATUS",
        "replica_status": "SHOW ALL SLAVES STATUS" if mariadb else "SHOW REPLICA STATUS",
        "replica_word": "SLAVE" if mariadb else "REPLICA",
        "cluster": None,
    }
    return Abilities(**(values | fields))
