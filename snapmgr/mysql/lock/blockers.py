"""Waits for all sessions that would block a lock before we request it, because writers queue behind a waiting request.

This module takes no lock and blocks no session; writers continue while we wait. docs/explanation/locks.md has the
measurements of which session blocks which lock. A statement younger than `blocker_age` does not count: it probably ends
within the lock's own wait, and a busy server always has one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError
from snapmgr.mysql.connect.statements import is_only_a_select
from snapmgr.mysql.lock.probe import Session, words

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.levels import LockLevel
    from snapmgr.mysql.lock.probe import LockProbe

_POLL_S = 0.2
_PAUSE_S = (0.1, 0.5)
_NAMED = 5
_NO_SUCH_THREAD = 1094
_KILL_DENIED = 1095
_BACKUP_PROGRAMS = ("mysqldump", "mysqlpump", "mydumper", "mariadb-dump", "xtrabackup", "mariadb-backup", "snapmgr")


class Blocker(Session, frozen=True, kw_only=True):
    """A session that would block the lock, and for how long it has."""

    age_s: float
    waits_for: int | None = None
    """The connection whose row lock it waits for, if known."""

    def __str__(self) -> str:
        """Return one line for the user, without literals of the statement."""
        who = f"connection {self.connection_id} ({self.account}) " if self.connection_id is not None else ""
        statement = f": {self.statement}" if self.statement else ""
        waits = f" (waits for a row that connection {self.waits_for} has locked)" if self.waits_for else ""
        return f"{who}{self.activity} for {format_duration(self.age_s)}{statement}{waits}"


def wait_for_blockers(
    connection: Connection,
    abilities: Abilities,
    level: LockLevel,
    *,
    at_most_s: float,
    min_age_s: float,
    kill_selects_after_s: float | None,
    ways: Sequence[str] = (),
    tell: Callable[[str], None],
) -> tuple[str, ...]:
    """Return as soon as the lock is not blocked by any session; the value names the SELECTs that were killed for it.

    Args:
        connection: will take the lock; it holds none yet, and is left unchanged.
        abilities: of its server.
        level: the lock to take.
        at_most_s: after this, plus up to `min_age_s`, NotQuiescedError names the remaining blockers.
        min_age_s: a session counts once it has blocked the lock for this long.
        kill_selects_after_s: a plain SELECT of an ordinary client that blocks the lock and is older than this is
            killed (KILL QUERY); None: none is.
        ways: ways to do without the wait, for the error's hint.
        tell: called with messages about blockers, killed statements, and missing privileges.

    Raises NotQuiescedError at the end of the time, ConnectionLostError.
    """
    deadline = time.monotonic() + at_most_s
    watch = BlockerWatch(connection, abilities, level, min_age_s)
    told: set[str] = set()
    killed: list[str] = []
    announced = False
    pause_s = _PAUSE_S[0]
    while True:
        found = watch.blockers()
        for warning in watch.probe.warnings:
            _tell_once(warning, told, tell)
        if not found:
            return tuple(killed)
        if not announced and at_most_s > 0:
            announced = True
            tell(f"waiting up to {format_duration(at_most_s)} for sessions that would block the lock: {_listed(found)}")
        for blocker in found:
            if kill_selects_after_s is not None and blocker.only_reads and blocker.age_s >= kill_selects_after_s:
                statement, problem = _kill(connection, blocker)
                if statement is not None:
                    killed.append(statement)
                    tell(f"killed the SELECT of {statement}")
                _tell_once(problem, told, tell)
        left = deadline - time.monotonic()
        if left <= 0:
            may_kill = kill_selects_after_s is not None
            raise _failure(watch.with_causes(found), at_most_s, level, ways, may_kill=may_kill)
        time.sleep(min(pause_s, left))
        pause_s = min(pause_s * 1.5, _PAUSE_S[1])


class BlockerWatch:
    """Polls for blockers, and measures their age if the server does not."""

    def __init__(self, connection: Connection, abilities: Abilities, level: LockLevel, min_age_s: float) -> None:
        self._min_age_s = min_age_s
        self.probe = _probe(connection, abilities, level)
        # On MariaDB a lock request that gives up leaves nothing behind.
        self._youngest_s = 0.0 if abilities.flavor == "mysql" else min_age_s
        self._since: dict[Hashable, float] = {}

    def blockers(self) -> tuple[Blocker, ...]:
        """Return the sessions that would have blocked the lock for `min_age_s`, the oldest first.

        Polls for about that long if only we measure the age. On MySQL it polls until each younger session has ended or
        is that old: a lock request that gives up there leaves a long statement's tables closed to all other
        sessions until the statement ends. Raises ConnectionLostError.
        """
        began = time.monotonic()
        young: set[Hashable] | None = None
        while True:
            now = time.monotonic()
            aged = [(self._age_s(session, now), session) for session in self.probe.blocking_sessions(self._youngest_s)]
            self._since = {session.key: self._since[session.key] for _, session in aged if session.key in self._since}
            old = [pair for pair in aged if pair[0] >= self._min_age_s]
            # Those that came since do not count: a busy server always has another one.
            still = {session.key for age_s, session in aged if age_s < self._min_age_s}
            young = still if young is None else young & still
            if not young or now - began >= self._min_age_s + _POLL_S:
                found = (
                    Blocker(**asdict(session) | {"age_s": max(age_s, session.age_s or 0)}) for age_s, session in old
                )
                return tuple(sorted(found, key=lambda blocker: -blocker.age_s))
            time.sleep(_POLL_S)

    def _age_s(self, session: Session, now: float) -> float:
        if session.age_s is not None and session.own_clock:
            return session.age_s
        return now - self._since.setdefault(session.key, now)

    def with_causes(self, blockers: Sequence[Blocker]) -> list[Blocker]:
        """Return them, the first few with the connections that they wait for, if visible."""
        causes = self.probe.row_lock_waits()
        named = [replace(each, waits_for=causes.get(each.connection_id or 0)) for each in blockers[:_NAMED]]
        return [*named, *blockers[_NAMED:]]


def _probe(connection: Connection, abilities: Abilities, level: LockLevel) -> LockProbe:
    # Only the one that this server needs is loaded.
    if abilities.flavor == "mysql":
        from snapmgr.mysql.lock.probe_mysql import MysqlLockProbe  # noqa: PLC0415

        return MysqlLockProbe(connection, level)
    from snapmgr.mysql.lock.probe_mariadb import MariadbLockProbe  # noqa: PLC0415

    return MariadbLockProbe(connection, level, backup_stages=abilities.backup_stages)


def _tell_once(text: str | None, told: set[str], tell: Callable[[str], None]) -> None:
    if text is not None and text not in told:
        told.add(text)
        tell(text)


def _listed(blockers: Sequence[Blocker]) -> str:
    more = f"; and {len(blockers) - _NAMED} more" if len(blockers) > _NAMED else ""
    return "; ".join(map(str, blockers[:_NAMED])) + more


def _failure(
    blockers: Sequence[Blocker], waited_s: float, level: LockLevel, more_ways: Sequence[str], *, may_kill: bool
) -> NotQuiescedError:
    named = [each for each in blockers[:_NAMED] if each.connection_id is not None]
    kills = [f"KILL {'' if each.idle else 'QUERY '}{each.connection_id}" for each in named if not each.system]
    # On a busy server most of these wait for rows themselves; then ending them one by one leads nowhere.
    causes = sorted({each.waits_for for each in named if each.waits_for} - {each.connection_id for each in named})
    causes = causes[: max(_NAMED - len(kills), 1)]
    kills = kills[: _NAMED - len(causes)]
    ways = [*more_ways]
    if kills:
        ways.append(f"end it manually ({'; '.join(kills)})")
    if any(each.connection_id is None for each in blockers):
        ways.append("find it in SHOW PROCESSLIST (the plugin METADATA_LOCK_INFO would name it)")
    if causes:
        ways.append("end the transaction that holds the rows (" + "; ".join(f"KILL {cause}" for cause in causes) + ")")
    if not may_kill and any(each.only_reads for each in blockers):
        ways.append("let the job end long SELECTs (kill_selects_after)")
    ways.append("raise blocker_wait or blocker_age")
    waited = f"after {format_duration(waited_s)} it" if waited_s > 0 else "it"
    return NotQuiescedError(
        f"{level} was not attempted: {waited} would still be blocked, with writers queued behind it, "
        f"by: {_listed(blockers)}",
        hint=", or ".join(ways),
    )


def _kill(connection: Connection, blocker: Blocker) -> tuple[str | None, str | None]:
    """Kill a blocker's SELECT; return its description if that was done, and the problem if it could not be.

    Neither if it has ended, or turns out not to be a plain SELECT.

    KILL QUERY names a connection, not a statement, so we read the statement's whole text again just before.
    """
    try:
        rows = connection.rows("SHOW FULL PROCESSLIST")
        text = next((str(row["Info"] or "") for row in rows if row["Id"] == blocker.connection_id), "")
        if not is_only_a_select(text) or words(text) != blocker.statement or _is_of_a_backup(connection, blocker):
            return None, None
        connection.execute(f"KILL QUERY {blocker.connection_id}")
    except ConnectionLostError:
        raise
    except MysqlError as error:
        if error.errno == _NO_SUCH_THREAD:
            return None, None
        why = f"this needs CONNECTION_ADMIN, and SYSTEM_USER too if {blocker.account} has it"
        why = why if error.errno == _KILL_DENIED else error.message
        return None, f"could not kill the SELECT of connection {blocker.connection_id}: {why}"
    statement = (
        f"connection {blocker.connection_id} ({blocker.account}), which had run for "
        f"{format_duration(blocker.age_s)}: {blocker.statement}"
    )
    return statement, None


def _is_of_a_backup(connection: Connection, blocker: Blocker) -> bool:
    program = connection.value(
        "SELECT ATTR_VALUE FROM performance_schema.session_connect_attrs "
        "WHERE PROCESSLIST_ID = %s AND ATTR_NAME = 'program_name'",
        (blocker.connection_id,),
    )
    return str(program or "").startswith(_BACKUP_PROGRAMS)
