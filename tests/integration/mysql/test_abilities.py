"""Abilities are read from real servers, and an account with only the privileges that doctor names can lock them."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.config.model import Job
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.doctor.account import grant_statements, missing_privileges, needed_privileges, read_grants
from snapmgr.mysql.connect.client import Connection, Credentials, connect
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.mysql.lock.quiesce import LockBounds, locked
from snapmgr.source.server import probe_server
from support.kinds import KINDS, kinds
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.server import PrivateServer

BOUNDS = LockBounds(max_stall_s=2, lock_attempts=2, lock_hold_s=5)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.needs(name)) for name in KINDS])
def server(request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    with work_folder() as folder, private_server(folder / "data", kind=request.param) as server:
        yield server


@contextmanager
def account(server: PrivateServer, *grants: str) -> Iterator[Job]:
    """Yield a job that logs in as an account with these privileges alone."""
    server.query("CREATE USER snap@localhost IDENTIFIED BY 'secret'")
    try:
        for grant in grants:
            server.query(grant)
        with work_folder() as folder:
            file = Path(folder, "client.cnf")
            file.write_text(f"[client]\nuser=snap\npassword=secret\nsocket={server.socket}\n")
            file.chmod(0o600)
            yield Job(source="mysql", defaults_file=str(file))
    finally:
        server.query("DROP USER snap@localhost")


def everything(server: PrivateServer) -> list[str]:
    job = Job(source="mysql", socket=str(server.socket), user="root")
    needed = needed_privileges(job, probe_server(job).abilities, replica="")
    return grant_statements("snap@localhost", needed).split("; ")


def test_each_server_tells_what_it_can_do(server: PrivateServer) -> None:
    abilities = probe_server(Job(source="mysql", socket=str(server.socket), user="root")).abilities
    mariadb = KINDS[server.kind.name].flavor == "mariadb"
    assert (abilities.backup_stages, abilities.instance_lock, abilities.statement_time) == (
        mariadb,
        not mariadb,
        mariadb,
    )
    assert (abilities.binlog, abilities.cluster) == (True, None)
    with connect(Credentials(socket=str(server.socket), user="root")) as connection:
        assert connection.rows(abilities.binlog_status)
        assert connection.rows(abilities.replica_status) == []


def test_a_server_is_asked_little_and_each_look_is_a_new_one(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    run = Connection._run

    def counted(connection: Connection, sql: str, args: Sequence[object]) -> list[dict[str, object]]:
        statements.append(sql)
        return run(connection, sql, args)

    monkeypatch.setattr(Connection, "_run", counted)
    live = probe_server(Job(source="mysql", socket=str(server.socket), user="root"))
    assert len(statements) <= 10
    assert sum(sql.startswith("SHOW GLOBAL VARIABLES WHERE") for sql in statements) == 1
    with connect(live.credentials) as connection:
        statements.clear()
        live.check(connection)
        assert len(statements) <= 3
        server.query("SET GLOBAL innodb_flush_log_at_trx_commit = 0")
        try:
            with pytest.raises(NotQuiescedError, match="changed since .*: innodb_flush_log_at_trx_commit"):
                live.check(connection)
        finally:
            server.query("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        live.check(connection)
        # Without a lock each of them matters.
        server.query("SET GLOBAL sync_binlog = 0")
        try:
            live.check(connection)
            with pytest.raises(NotQuiescedError, match="changed since .*: sync_binlog"):
                replace(live, lockless=True).check(connection)
        finally:
            server.query("SET GLOBAL sync_binlog = 1")
        replace(live, lockless=True).check(connection)


@pytest.mark.parametrize("level", ["backup-lock", "global-read-lock"])
@pytest.mark.parametrize("logs_apart", [(), ("/elsewhere",)])
def test_what_doctor_asks_for_is_enough(server: PrivateServer, level: str, logs_apart: tuple[str, ...]) -> None:
    with account(server, *everything(server)) as job:
        live = probe_server(job)
        said: list[str] = []
        with locked(
            live.credentials,
            live.abilities,
            choose(level, live.abilities, LockNeeds(logs_apart=logs_apart)),
            BOUNDS,
            check=live.check,
            sync=lambda: None,
            tell=said.append,
        ) as lock:
            lock.prove()
            lock.release()
        assert lock.position is not None
        assert said == []


def test_each_privilege_that_is_missing_is_named(server: PrivateServer) -> None:
    job = Job(source="mysql", socket=str(server.socket), user="root")
    needed = needed_privileges(job, probe_server(job).abilities, replica="")
    for left_out in needed:
        rest = [one for one in needed if one is not left_out]
        with account(server, *grant_statements("snap@localhost", rest).split("; ")) as limited:
            credentials = Credentials(defaults_file=limited.defaults_file)
            with connect(credentials) as connection:
                assert missing_privileges(read_grants(connection), needed) == (left_out,)


@kinds("mysql-9")
def test_a_member_of_a_group_is_refused(kind: str) -> None:
    group = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
    options = ("--plugin-load-add=group_replication.so", f"--loose-group-replication-group-name={group}")
    with work_folder() as folder, private_server(folder / "data", options, kind=kind) as server:
        live = probe_server(Job(source="mysql", socket=str(server.socket), user="root"))
        with pytest.raises(NotQuiescedError, match="Group Replication") as failure:
            live.abilities.refuse_cluster()
        assert failure.value.hint
