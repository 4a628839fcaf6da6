"""The end of the binary logs of a server that crashed, beside what its own recovery makes of them."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from snapmgr.mysql.binlog import iterate, read_tail, tail
from snapmgr.mysql.binlog_events import GtidList, PreviousGtids
from support import binlogs
from support.kinds import KINDS, each_kind
from support.load import write_load
from support.server import private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.server import PrivateServer

_KILLS = 2
_CUTS = 2


@pytest.fixture
def folder() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def say(server: PrivateServer) -> binlogs.Said:
    with server.connect() as connection, connection.cursor() as cursor:
        return binlogs.say(cursor)


def copy_logs(source: Path, target: Path) -> None:
    user = server_user()
    for path in source.glob("binlog.*"):
        shutil.copy(path, target)
        if os.geteuid() == 0:
            os.chown(target / path.name, user.pw_uid, user.pw_gid)


@each_kind
def test_of_a_killed_server_the_tail_is_where_its_recovery_ends(folder, kind):
    mysql = KINDS[kind].flavor == "mysql"
    with (
        private_server(folder / "data", kind=kind) as server,
        write_load(server.socket, writers=4, engines=KINDS[kind].engines) as load,
    ):
        for number in range(_KILLS):
            load.warm_up(5)
            server.kill()
            load.kill()
            copy = folder / f"copy-{number}"
            copy.mkdir()
            copy_logs(server.datadir, copy)
            found = read_tail(copy / "binlog")
            assert found.position is not None
            assert found.in_use
            assert found.transactions
            server.start()
            assert say(server).gtid == found.position.gtid
            left = server.datadir / found.position.file
            if mysql:
                # It cuts the incomplete transaction off.
                assert left.stat().st_size == found.position.offset
            elif not found.truncated:
                assert left.stat().st_size == found.position.offset
            else:
                assert left.stat().st_size > found.position.offset
            # The new file begins where the old one ended.
            assert tail(server.datadir / say(server).file).transactions == 0
            if number < _KILLS - 1:
                load.start()


@each_kind
def test_of_a_log_cut_off_anywhere_the_server_recovers_up_to_the_tail(folder, kind):
    rng = random.Random(f"{kind} cut off")
    mysql = KINDS[kind].flavor == "mysql"
    own = binlogs.MYSQL_TAGS if mysql else binlogs.MARIADB_DOMAINS
    kept = folder / "kept"
    kept.mkdir()
    with private_server(folder / "data", kind=kind) as server:
        with server.connect() as connection, connection.cursor() as cursor:
            for statement in (*binlogs.SETUP, "FLUSH BINARY LOGS", *binlogs.XA, *own, *binlogs.UNFINISHED_XA):
                cursor.execute(statement)
        server.kill()
        copy_logs(server.datadir, kept)
    last = binlogs.logs(kept / "binlog")[-1]
    events = list(iterate(last))
    beginning = next(event.next_offset for event in events if isinstance(event.body, PreviousGtids | GtidList))
    # A cut inside an event, and one between two.
    cuts = [rng.randrange(beginning, last.stat().st_size) for _ in range(_CUTS // 2)]
    cuts += [event.offset for event in rng.sample([e for e in events if e.offset > beginning], _CUTS // 2)]
    for number, cut in enumerate(cuts):
        # The data are of no matter: they are a fresh server's.
        data = folder / f"data-{number}"
        with private_server(data, kind=kind, start=False) as server:
            copy_logs(kept, data)
            os.truncate(data / last.name, cut)
            found = read_tail(data / "binlog")
            assert found.position is not None
            assert found.truncated == (found.position.offset < cut)
            server.start()
            assert say(server).gtid == found.position.gtid, cut
            assert (data / last.name).stat().st_size == (found.position.offset if mysql else cut)
        shutil.rmtree(data)
