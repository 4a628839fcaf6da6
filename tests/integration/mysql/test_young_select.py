"""A SELECT that has just begun and will run long: on MySQL a lock request that gives up behind it closes its table."""

from __future__ import annotations

import time
from threading import Thread

from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock.blockers import BlockerWatch
from support.kinds import kinds
from support.server import private_server
from support.storage import work_folder


@kinds("mysql-9")
def test_a_select_that_has_just_begun_is_not_overlooked(kind: str) -> None:
    with work_folder() as folder, private_server(folder / "data", kind=kind) as server:
        server.query("CREATE DATABASE d")
        server.query("CREATE TABLE d.t (a INT PRIMARY KEY)")
        server.query("INSERT INTO d.t VALUES (1), (2)")
        with connect(Credentials(socket=server.socket, user="root")) as connection:
            abilities = probe_abilities(connection, identify(connection))
            start = time.monotonic()
            assert BlockerWatch(connection, abilities, "backup-lock", 1.0).blockers() == ()
            assert time.monotonic() - start < 0.5
            reader = Thread(target=server.query, args=("SELECT a, SLEEP(2) FROM d.t",))
            reader.start()
            try:
                while not server.query("SELECT 1 FROM information_schema.PROCESSLIST WHERE STATE = 'User sleep'"):
                    time.sleep(0.01)
                (found,) = BlockerWatch(connection, abilities, "backup-lock", 1.0).blockers()
                assert found.only_reads
            finally:
                reader.join()
