"""Positions of a replica's sources: a new replica from a snapshot starts there and becomes equal to the source."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.mysql.lock.quiesce import LockBounds, locked
from snapmgr.mysql.lock.replication import settle_sources
from support.processes import wait_until
from support.replicas import By, Pair, inserting, replica_pair, server_on, snapshot
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import SourcePosition
    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection

pytestmark = [pytest.mark.needs("root", "loop", "btrfs", "mariadbd"), pytest.mark.timeout(180)]

STAGES = tuple(f"BACKUP STAGE {stage}" for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT"))
FTWRL = ("FLUSH TABLES WITH READ LOCK",)
NO_GTID = ("--gtid-mode=OFF", "--enforce-gtid-consistency=OFF")


@contextmanager
def looking(pair: Pair) -> Iterator[tuple[Connection, Abilities]]:
    """A connection of snapmgr's to the replica."""
    with connect(Credentials(socket=pair.replica.socket, user="root")) as connection:
        yield connection, probe_abilities(connection, identify(connection))


@contextmanager
def scene(kind: str, by: By, options: tuple[str, ...] = (), own: tuple[str, ...] = ()) -> Iterator[tuple[Pair, Path]]:
    """A pair whose replica's datadir is in a btrfs subvolume, and the file system's root."""
    with loop_filesystem("btrfs", 2 << 30, base=Path("/dev/shm")) as btrfs:
        subvolume = Path(btrfs.point) / "replica"
        subprocess.run(["btrfs", "-q", "subvolume", "create", subvolume], check=True)
        with replica_pair(subvolume / "data", kind, by=by, options=options, replica_options=own) as pair:
            yield pair, Path(btrfs.point)


def take(pair: Pair, root: Path, name: str, lock: tuple[str, ...]) -> tuple[SourcePosition, ...]:
    """Snapshot the replica under a lock; return what was recorded of its sources."""
    with looking(pair) as (connection, abilities):
        for statement in lock:
            connection.execute(statement)
        sources = settle_sources(
            connection, abilities, deadline=time.monotonic() + 5, global_read_lock=lock == FTWRL, only_innodb=True
        )
        snapshot(root / "replica", root / name)
    return sources


def prove(pair: Pair, copy: Path, at: SourcePosition, by: By) -> None:
    """Start a server on a copy, replicate from the recorded position on, and wait until it equals the source."""
    with server_on(pair, copy / "data") as server:
        if by == "gtid":
            variable = "gtid_slave_pos" if pair.mariadb else "gtid_executed"
            ((found,),) = server.query(f"SELECT @@GLOBAL.{variable}")
            assert "".join(found.split()) == at.gtid
        pair.replicate(server, by, at)
        pair.start(server)
        pair.wait_equal(server)


@pytest.mark.parametrize(
    ("kind", "by", "lock", "options", "own"),
    [
        pytest.param("mariadb-10.11", "gtid", STAGES, (), ("--slave-parallel-threads=4",), id="10.11-gtid-parallel"),
        pytest.param("mariadb-10.11", "file", STAGES, (), (), id="10.11-file-serial"),
        pytest.param("mariadb-10.11", "file", FTWRL, (), ("--slave-parallel-threads=4",), id="10.11-file-parallel"),
        pytest.param(
            *("mariadb-11.8", "gtid", STAGES, (), ("--slave-parallel-threads=4",)),
            id="11.8-gtid-parallel",
            marks=pytest.mark.needs("mariadb-11.8"),
        ),
        pytest.param("mysql-9", "file", FTWRL, NO_GTID, (), id="9-file-parallel", marks=pytest.mark.needs("mysql-9")),
    ],
)
def test_the_position_is_where_a_new_replica_has_to_begin(
    kind: str, by: By, lock: tuple[str, ...], options: tuple[str, ...], own: tuple[str, ...]
) -> None:
    with scene(kind, by, options, own) as (pair, root):
        with inserting(pair.source):
            time.sleep(0.5)
            (first,) = take(pair, root, "first", lock)
            time.sleep(0.3)
            (at,) = take(pair, root, "copy", lock)
        assert first != at
        assert (at.channel, at.host, at.port) == ("", "127.0.0.1", pair.source_port)
        assert bool(at.gtid) == (by == "gtid")
        assert bool(at.file) == (by == "file")
        prove(pair, root / "copy", at, by)


def test_a_commit_that_waits_for_its_acknowledgement_holds_the_lock_off() -> None:
    """Semi-synchronous, and the replica does not answer: exit code 4 within the bound, and the commit succeeds."""
    with work_folder() as folder, replica_pair(folder / "replica", "mariadb-10.11") as pair:
        pair.replica.query("SET GLOBAL rpl_semi_sync_slave_enabled = 1")
        pair.stop()
        pair.start()
        for setting in ("enabled = 1", "timeout = 60000", "wait_point = AFTER_SYNC"):
            pair.source.query(f"SET GLOBAL rpl_semi_sync_master_{setting}")
        clients = "SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'"
        wait_until(lambda: pair.source.query(clients) == (("Rpl_semi_sync_master_clients", "1"),))
        credentials = Credentials(socket=pair.source.socket, user="root")
        with connect(credentials) as connection:
            abilities = probe_abilities(connection, identify(connection))
        bounds = LockBounds(max_stall_s=1, lock_attempts=2, lock_hold_s=5)
        choice = choose("auto", abilities, LockNeeds())
        os.kill(pair.replica.pid, signal.SIGSTOP)
        try:
            writer = threading.Thread(target=pair.source.query, args=("INSERT INTO load_test.t0 VALUES (1, 1, '')",))
            writer.start()
            time.sleep(0.3)
            began = time.monotonic()
            with (
                pytest.raises(NotQuiescedError, match="not granted"),
                locked(credentials, abilities, choice, bounds, check=lambda _: None, sync=lambda: None),
            ):
                pass
            assert time.monotonic() - began < 10
        finally:
            os.kill(pair.replica.pid, signal.SIGCONT)
            writer.join()
        with locked(credentials, abilities, choice, bounds, check=lambda _: None, sync=lambda: None) as lock:
            lock.prove()
            lock.release()
        pair.wait_equal()
