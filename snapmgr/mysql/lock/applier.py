"""Stops a replica's appliers for a snapshot, and then starts exactly those that were running.

If we are killed, a guard (`snapmgr.mysql.lock.guard`) starts them again. It opens its own connection, because
ours dies with us. Before the stop we record the stopped appliers in a file. If even the guard was killed,
`restart_leftovers` starts them at the next command. A server that was restarted meanwhile is left alone.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from snapmgr.contract.errors import NotFoundError, NotQuiescedError, SnapmgrError
from snapmgr.mysql.connect.client import Credentials, MysqlError, connect
from snapmgr.mysql.lock.guard import drop_record, guarded, remove_dead_groups, write_record
from snapmgr.mysql.lock.replication import read_channels
from snapmgr.system.files import read_file
from snapmgr.system.host import Process, is_alive, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.replication import Channel

_GUARD = "applier"
_POLL_S = 0.02
# For our own START, and for that of `restart_leftovers`: longer than a lock is held.
_START_S = 15.0
# The guard keeps trying this long: behind a STOP that still waits, or a server that accepts no more connections.
_PATIENCE_S = 3600.0
_RETRY_S = 1.0
# A guard that has not acted this long after its deadline is not running, or cannot act.
_LATE_S = 5.0
_DENIED = 1227
# MySQL's rpl_stop_replica_timeout has expired: the thread stops later by itself.
_STOPS_LATER = 1875


class _NoRightError(MysqlError):
    """The account may not stop an applier; none was stopped."""


class _Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """The record on disk: the stopped appliers, their server, the guard that starts them, and its time."""

    server: Process
    guard: Process | None
    deadline: float
    """time.monotonic()"""
    socket: str
    defaults_file: str | None
    user: str | None
    mariadb: bool
    word: str
    """As in START REPLICA."""
    names: tuple[str, ...]
    """Of the channels."""

    @property
    def credentials(self) -> Credentials:
        """The login; contains no secret."""
        return Credentials(socket=self.socket, defaults_file=self.defaults_file, user=self.user)

    def statement(self, verb: str, name: str) -> str:
        """Return the statement that stops or starts the SQL thread of one channel."""
        quoted = "'" + name.replace("\\", "\\\\").replace("'", "''") + "'"
        if self.mariadb:
            return f"{verb} {self.word} {quoted} SQL_THREAD"
        return f"{verb} {self.word} SQL_THREAD FOR CHANNEL {quoted}"


@contextmanager
def applier_stopped(
    credentials: Credentials,
    abilities: Abilities,
    *,
    time_limit_s: float,
    record: Path,
    check: Callable[[Connection], None],
) -> Iterator[None]:
    """Stop the appliers of a replica while the context lasts; it still receives, and applies later.

    Does nothing on a server without a running applier.

    Args:
        credentials: how to log in, with the right to stop and start replication.
        abilities: of the server.
        time_limit_s: the guard starts them again after this in any case; they may take as long to stop.
        record: file that names the stopped appliers; written before the stop, removed after the start.
        check: checks the connection and raises if it is the wrong server.

    Raises NotQuiescedError if they do not stop in time, run UNTIL a position, or do not start again; MysqlError without
    the right.
    """
    with connect(credentials) as connection:
        check(connection)
        running = [channel for channel in read_channels(connection, abilities) if channel.applies]
        if not running:
            yield
            return
        _refuse_until(running)
        plan = _Stopped(
            server=this_process(connection.peer_pid()),
            guard=None,
            deadline=time.monotonic() + time_limit_s,
            socket=connection.socket,
            defaults_file=credentials.defaults_file,
            user=credentials.user,
            mariadb=abilities.flavor == "mariadb",
            word=abilities.replica_word,
            names=tuple(channel.name for channel in running),
        )
        with guarded(_GUARD, partial(_keep_starting, plan, record), plan.deadline) as guard:
            write_record(record, msgspec.json.encode(msgspec.structs.replace(plan, guard=guard.process)))
            failure = None
            try:
                _stop(connection, abilities, plan)
                yield
            except SnapmgrError as error:
                failure = error
                raise
            finally:
                # On a connection of its own: the first one may still wait for a STOP, or be gone.
                unfinished = None if isinstance(failure, _NoRightError) else _try_to_start(plan)
                if unfinished is None:
                    drop_record(record)
                    guard.dismiss()
                elif failure is not None:
                    failure.hint = "; ".join(filter(None, (failure.hint, unfinished.message, unfinished.hint)))
        if unfinished is not None:
            raise unfinished


def _refuse_until(running: list[Channel]) -> None:
    bounded = [channel.title for channel in running if channel.until]
    if bounded:
        raise NotQuiescedError(
            f"the applier of {', '.join(bounded)} runs UNTIL a position: snapmgr cannot start it again in that way",
            hint="wait for it, or take the snapshot without stop_replica",
        )


def _stop(connection: Connection, abilities: Abilities, plan: _Stopped) -> None:
    """Stop the channels' SQL threads and wait until none of them runs. Raises NotQuiescedError at the deadline."""
    try:
        for name in plan.names:
            connection.set_read_timeout(max(plan.deadline - time.monotonic(), 0.001))
            _stop_one(connection, plan.statement("STOP", name))
        while True:
            connection.set_read_timeout(max(plan.deadline - time.monotonic(), 0.001))
            left = [one for one in read_channels(connection, abilities) if one.name in plan.names and one.applies]
            if not left:
                return
            if time.monotonic() >= plan.deadline:
                break
            time.sleep(_POLL_S)
    except MysqlError as error:
        if error.errno == _DENIED:
            privilege = "REPLICATION SLAVE ADMIN" if plan.mariadb else "REPLICATION_SLAVE_ADMIN"
            raise _NoRightError(
                error.message, errno=error.errno, hint=f"GRANT {privilege} ON *.* to the account, for stop_replica"
            ) from None
        if time.monotonic() < plan.deadline:
            raise
    raise NotQuiescedError(
        "the replica's applier did not stop in time",
        hint="it executes a long transaction, after which replication continues: try again later",
    )


def _stop_one(connection: Connection, statement: str) -> None:
    try:
        connection.execute(statement)
    except MysqlError as error:
        if error.errno != _STOPS_LATER:
            raise


def _try_to_start(plan: _Stopped) -> NotQuiescedError | None:
    """Start the stopped appliers; return the error if that fails (then the guard keeps trying)."""
    try:
        _start(plan, wait_s=_START_S)
    except SnapmgrError as error:
        return NotQuiescedError(
            f"replication was not started again yet: {error.message}",
            hint=f"a process of snapmgr keeps trying; to start it manually: {'; '.join(_start_statements(plan))}",
        )
    return None


def _start(plan: _Stopped, *, wait_s: float) -> bool:
    """Start the channels' SQL threads if it is still the same server; return whether it is. Raises MysqlError.

    A START waits up to `wait_s` behind a STOP that still waits.
    """
    if not is_alive(plan.server):
        return False
    with connect(plan.credentials) as connection:
        connection.set_read_timeout(wait_s)
        if connection.peer_pid() != plan.server.pid or not is_alive(plan.server):
            return False
        for name in plan.names:
            connection.execute(plan.statement("START", name))
    return True


def _keep_starting(plan: _Stopped, record: Path) -> None:
    """Start the stopped appliers, with as many tries as it takes. Runs in the guard."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        with suppress(SnapmgrError):
            # One START that waits long, rather than many that queue up.
            _start(plan, wait_s=_PATIENCE_S)
            drop_record(record)
            return
        time.sleep(_RETRY_S)


def _start_statements(plan: _Stopped) -> list[str]:
    return [plan.statement("START", name) for name in plan.names]


def restart_leftovers(folder: Path) -> list[str]:
    """Start appliers whose stopper *and* guard were killed; return a message for the user for each server.

    Appliers with a live guard are left to it. A server that was restarted is left alone.
    """
    said: list[str] = []
    for path in sorted(folder.glob("*")):
        try:
            plan = msgspec.json.decode(read_file(path), type=_Stopped)
        except NotFoundError:
            continue
        except SnapmgrError as error:
            said.append(f"a replica's applier may be stopped, and its record cannot be read: {error.message}")
            continue
        except (msgspec.DecodeError, UnicodeDecodeError):
            # The record is incomplete, so nothing was stopped yet: the stop comes after the whole record.
            drop_record(path)
            continue
        guarded_still = plan.guard is not None and is_alive(plan.guard) and time.monotonic() < plan.deadline + _LATE_S
        if is_alive(plan.server) and guarded_still:
            continue
        try:
            if _start(plan, wait_s=_START_S):
                said.append(
                    f"an interrupted run had stopped replication on the server at {plan.socket}; it is started now"
                )
        except SnapmgrError as error:
            said.append(
                f"an interrupted run left replication stopped on the server at {plan.socket}, and we cannot start it "
                f"now ({error.message}): {'; '.join(_start_statements(plan))}"
            )
            continue
        drop_record(path)
    remove_dead_groups(_GUARD)
    return said
