"""Waits for what would hold a lock off, before the lock is tried: a lock that waits makes all writers wait behind it.

Nothing here locks or makes anybody wait; while we wait, writers write on. What holds which lock off was measured, and
is in docs/explanation/locks.md. A statement younger than a second does not count: it probably ends within the lock's
own wait, and on a busy server there is always one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError
from snapmgr.mysql.connect.statements import is_only_a_select
from snapmgr.mysql.lock.probe import Session, words
from snapmgr.mysql.lock.probe_mariadb import MariadbLockProbe
from snapmgr.mysql.lock.probe_mysql import MysqlLockProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.lock.levels import LockLevel
    from snapmgr.mysql.lock.probe import LockProbe

_MIN_AGE_S = 1.0
_LOOK_AGAIN_S = 0.2
_PAUSE_S = (0.1, 0.5)
_NAMED = 5
_GONE = 1094
_NOT_OURS_TO_KILL = 1095
_BACKUP_PROGRAMS = ("mysqldump", "mysqlpump", "mydumper", "mariadb-dump", "xtrabackup", "mariadb-backup", "snapmgr")


@dataclass(frozen=True, kw_only=True)
class Blocker(Session):
    """What would hold the lock off, and since when."""

    age_s: float
    held_up_by: int | None = None
    """The connection whose row lock it waits for, if that is known."""

    def __str__(self) -> str:
        """Return one line for people, without literals of the statement."""
        who = f"connection {self.connection_id} ({self.account}) " if self.connection_id is not None else ""
        statement = f": {self.statement}" if self.statement else ""
        waits = f" (waits for a row that connection {self.held_up_by} has locked)" if self.held_up_by else ""
        return f"{who}{self.what} for {format_duration(self.age_s)}{statement}{waits}"


def find_blockers(connection: Connection, abilities: Abilities, level: LockLevel) -> tuple[Blocker, ...]:
    """Return what would hold this lock off now, the oldest first. Takes up to a second where no clock tells an age.

    Raises ConnectionLostError. What the account may not see is not found; `wait_for_blockers` says so.
    """
    return _Watch(connection, abilities, level).blockers()


def wait_for_blockers(
    connection: Connection,
    abilities: Abilities,
    level: LockLevel,
    *,
    at_most_s: float,
    kill_selects_after_s: float | None,
    tell: Callable[[str], None],
) -> None:
    """Return as soon as nothing would hold this lock off.

    Args:
        connection: the one that will take the lock; it holds none yet, and is left as it was.
        abilities: of its server.
        level: the lock that is to be taken.
        at_most_s: after it, and up to a second more, NotQuiescedError names what is still there.
        kill_selects_after_s: a plain SELECT of an ordinary client that holds the lock off and is older than this is
            ended (KILL QUERY); None: nothing ever is.
        tell: called with what is waited for, what was killed, and what the account may not see.

    Raises NotQuiescedError when the time is over, ConnectionLostError.
    """
    deadline = time.monotonic() + at_most_s
    watch = _Watch(connection, abilities, level)
    told: set[str] = set()
    announced = False
    pause_s = _PAUSE_S[0]
    while True:
        found = watch.blockers()
        for complaint in watch.lookout.complaints:
            _tell_once(complaint, told, tell)
        if not found:
            return
        if not announced and at_most_s > 0:
            announced = True
            tell(f"waiting up to {format_duration(at_most_s)} for what would hold the lock off: {_listed(found)}")
        for blocker in found:
            if kill_selects_after_s is not None and blocker.only_reads and blocker.age_s >= kill_selects_after_s:
                _tell_once(_kill(connection, blocker), told, tell)
        left = deadline - time.monotonic()
        if left <= 0:
            raise _failure(watch.with_causes(found), at_most_s, level, may_kill=kill_selects_after_s is not None)
        time.sleep(min(pause_s, left))
        pause_s = min(pause_s * 1.5, _PAUSE_S[1])


class _Watch:
    """Looks again and again, and keeps the time where the server does not."""

    def __init__(self, connection: Connection, abilities: Abilities, level: LockLevel) -> None:
        self.lookout: LockProbe = (
            MysqlLockProbe(connection, level)
            if abilities.flavor == "mysql"
            else MariadbLockProbe(connection, level, backup_stages=abilities.backup_stages)
        )
        # MariaDB's locks that give up leave nothing behind.
        self._youngest_s = 0.0 if abilities.flavor == "mysql" else _MIN_AGE_S
        self._since: dict[Hashable, float] = {}

    def blockers(self) -> tuple[Blocker, ...]:
        """Return what has been in the way for a second, the oldest first.

        Looks for up to a second where only we keep the time, and on MySQL until what is younger has ended or is no
        longer: a lock that gives up there would leave a long statement's tables closed to everybody until it ends.
        """
        began = time.monotonic()
        young: set[Hashable] | None = None
        while True:
            now = time.monotonic()
            held = [(self._age_s(holder, now), holder) for holder in self.lookout.look(self._youngest_s)]
            self._since = {holder.key: self._since[holder.key] for _, holder in held if holder.key in self._since}
            old = [pair for pair in held if pair[0] >= _MIN_AGE_S]
            # On a busy server there is always another one.
            still = {holder.key for age_s, holder in held if age_s < _MIN_AGE_S}
            young = still if young is None else young & still
            if not young or now - began >= _MIN_AGE_S + _LOOK_AGAIN_S:
                found = (Blocker(**vars(holder) | {"age_s": max(age_s, holder.age_s or 0)}) for age_s, holder in old)
                return tuple(sorted(found, key=lambda blocker: -blocker.age_s))
            time.sleep(_LOOK_AGAIN_S)

    def _age_s(self, holder: Session, now: float) -> float:
        if holder.age_s is not None and holder.own_clock:
            return holder.age_s
        return now - self._since.setdefault(holder.key, now)

    def with_causes(self, blockers: Sequence[Blocker]) -> list[Blocker]:
        """Return them with whom they wait for themselves, where that can be seen."""
        causes = self.lookout.held_up_by()
        return [replace(each, held_up_by=causes.get(each.connection_id or 0)) for each in blockers]


def _tell_once(text: str | None, told: set[str], tell: Callable[[str], None]) -> None:
    if text is not None and text not in told:
        told.add(text)
        tell(text)


def _listed(blockers: Sequence[Blocker]) -> str:
    more = f"; and {len(blockers) - _NAMED} more" if len(blockers) > _NAMED else ""
    return "; ".join(map(str, blockers[:_NAMED])) + more


def _failure(blockers: Sequence[Blocker], waited_s: float, level: LockLevel, *, may_kill: bool) -> NotQuiescedError:
    named = [each for each in blockers[:_NAMED] if each.connection_id is not None]
    kills = [f"KILL {'' if each.idle else 'QUERY '}{each.connection_id}" for each in named if not each.system]
    ways = [f"end it by hand ({'; '.join(kills)})"] if kills else []
    if any(each.connection_id is None for each in blockers):
        ways.append("look for it in SHOW PROCESSLIST (the plugin METADATA_LOCK_INFO would name it)")
    if causes := sorted({each.held_up_by for each in blockers if each.held_up_by}):
        ways.append("end the transaction that holds the rows (" + "; ".join(f"KILL {cause}" for cause in causes) + ")")
    if not may_kill and any(each.only_reads for each in blockers):
        ways.append("let the job end long SELECTs (kill_selects_after)")
    ways.append("raise blocker_wait")
    waited = f"after {format_duration(waited_s)} it" if waited_s > 0 else "it"
    return NotQuiescedError(
        f"the {level} was not tried: {waited} would still wait, and writers behind it, for this: {_listed(blockers)}",
        hint=", or ".join(ways),
    )


def _kill(connection: Connection, blocker: Blocker) -> str | None:
    """End a blocker's SELECT and return what to tell; None if it has ended, or is not what it seemed.

    The server has no "kill this statement": so its whole text is looked at once more right before.
    """
    try:
        rows = connection.rows("SHOW FULL PROCESSLIST")
        text = next((str(row["Info"] or "") for row in rows if row["Id"] == blocker.connection_id), "")
        if not is_only_a_select(text) or words(text) != blocker.statement or _is_of_a_backup(connection, blocker):
            return None
        connection.execute(f"KILL QUERY {blocker.connection_id}")
    except ConnectionLostError:
        raise
    except MysqlError as error:
        if error.errno == _GONE:
            return None
        why = f"it takes CONNECTION_ADMIN, and SYSTEM_USER too if {blocker.account} has that"
        why = why if error.errno == _NOT_OURS_TO_KILL else error.message
        return f"the SELECT of connection {blocker.connection_id} could not be ended: {why}"
    return (
        f"ended the SELECT of connection {blocker.connection_id} ({blocker.account}), "
        f"which had run for {format_duration(blocker.age_s)}: {blocker.statement}"
    )


def _is_of_a_backup(connection: Connection, blocker: Blocker) -> bool:
    program = connection.value(
        "SELECT ATTR_VALUE FROM performance_schema.session_connect_attrs "
        "WHERE PROCESSLIST_ID = %s AND ATTR_NAME = 'program_name'",
        (blocker.connection_id,),
    )
    return str(program or "").startswith(_BACKUP_PROGRAMS)
