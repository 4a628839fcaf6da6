"""Chooses the lock for a server, from its abilities and the snapshot's needs. Pure.

Sources: MariaDB's documentation of BACKUP STAGE, MySQL's of LOCK INSTANCE FOR BACKUP, both of FLUSH TABLES WITH READ
LOCK. The guarantees of each level were measured with both under load (docs/explanation/locks.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.abilities import is_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from snapmgr.catalog.manifest import Level
    from snapmgr.mysql.connect.abilities import Abilities

LockLevel = Literal["backup-lock", "global-read-lock"]

_FTWRL = "FLUSH TABLES WITH READ LOCK"
_FLUSH_LOGS = "FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS"
# Engines without data on disk that must agree with other data.
_WITHOUT_DATA = frozenset({"MEMORY", "BLACKHOLE", "FEDERATED", "CONNECT", "SPIDER", "SEQUENCE", "MRG_MyISAM", "NDB"})
# Engines whose writers BACKUP STAGE lets end their statement, or that commit together with the binary log. Aria does
# neither: its rows are already in the binary log when BLOCK_COMMIT stops their commit, and recovery undoes them
# (measured: 6 of 60 snapshots; under FLUSH TABLES WITH READ LOCK none).
_STAGED = frozenset({"InnoDB", "MyISAM", "CSV", "ARCHIVE"})
_SHOWN_ENGINES = 5
REDO_AT_COMMIT = "innodb_flush_log_at_trx_commit"
"""The variable that decides whether a commit is in InnoDB's log files (1, 2, 3) or up to 1 s in memory only (0)."""
_ALWAYS_SYNCED = ("sync_binlog", REDO_AT_COMMIT)
_ENCRYPTED = ("encrypt_binlog", "binlog_encryption")
_LOGS_WHAT_IT_REPLICATES = ("log_replica_updates", "log_slave_updates")
DURABILITY = (*_ALWAYS_SYNCED, *_ENCRYPTED, *_LOGS_WHAT_IT_REPLICATES)
"""Variables that decide whether the end of the binlog matches the data, and whether we can read it."""


class LockNeeds(Struct, frozen=True, kw_only=True):
    """The requirements of a snapshot on the lock."""

    position: bool = True
    """Whether the binlog position must be exact."""
    engines: Mapping[str, int] | None = None
    """Tables by engine, system schemas excluded; None: unknown."""
    atomic: bool = True
    """Whether the storage snapshots all files of the server, its logs included, in one instant."""
    logs_apart: tuple[str, ...] = ()
    """Folders of binary and relay logs that are from another instant than the data, or not in the snapshot."""
    settings: Mapping[str, str] | None = None
    """The server's DURABILITY variables; None: unknown."""
    parallel_applier: bool = False
    """Whether it is a replica that applies with several threads."""
    replica: bool = False
    """Whether it is a replica."""
    applies: bool = False
    """Whether it is a replica whose applier is at work during the snapshot."""

    @property
    def unstaged_engines(self) -> tuple[str, ...]:
        """The `other_engines` for which a position under BACKUP STAGE is not exact."""
        return tuple(sorted(set(self.other_engines) - _STAGED))

    @property
    def redo_lags(self) -> bool:
        """Whether the latest commits are only in the server's memory."""
        return (self.settings or {}).get(REDO_AT_COMMIT) == "0"

    @property
    def other_engines(self) -> tuple[str, ...]:
        """Engines with tables that are not crash-safe, or do not recover to one instant."""
        return tuple(sorted(set(self.engines or {}) - {"InnoDB"} - _WITHOUT_DATA))


class LockChoice(Struct, frozen=True, kw_only=True):
    """A level, its reason (for the user), and its statements."""

    level: LockLevel | Literal["crash-consistent"]
    why: str
    freeze: bool = False
    """Whether the process is frozen as well, while the lock is held (`snapmgr.mysql.lock.freeze`)."""
    position: bool = True
    """Whether the lock stops the binlog position from moving."""
    tail: bool = False
    """Whether we read the position from the snapshot's own binary logs afterwards."""
    only_innodb: bool = False
    """Whether all tables are InnoDB, system schemas excluded."""
    begin: tuple[str, ...] = ()
    """Statements that block other backups and DDL, but not writers."""
    lock: tuple[str, ...] = ()
    """Statements that stop writers. After an error the connection must end."""
    flush: tuple[str, ...] = ()
    """Statements to run under the lock, before the storage call."""
    unlock: tuple[str, ...] = ()
    redo_lags: bool = False
    """Whether we must wait until all commits are in InnoDB's log files."""
    instead: LockChoice | None = None
    """The other way, if there is one: no lock, for a lock that is not free at once; a lock, for DDL without one."""
    ways: tuple[str, ...] = ()
    """What the owner can do so that a lock is easier to get, or not needed: for the hints of errors."""

    @property
    def global_read_lock(self) -> bool:
        """Whether FLUSH TABLES WITH READ LOCK is part of it."""
        return _FTWRL in self.lock

    @property
    def name(self) -> Level:
        """Its name in the job, in the manifest and in messages."""
        return "freeze-process" if self.freeze else self.level


def choose(asked: str, abilities: Abilities, needs: LockNeeds) -> LockChoice:
    """Given the requested level, the server's abilities and the snapshot's needs, return the lock to take.

    "auto" is the weakest sufficient lock, with another way (`LockChoice.instead`) where no lock would do. Raises
    NotQuiescedError for a level that this server or this layout does not allow, and for one under which the position
    would not be exact, if it must be. The caller handles "stopped", which needs no lock.
    """
    abilities.refuse_cluster()
    if needs.position and not abilities.binlog and not needs.replica:
        raise NotQuiescedError(
            'position = "exact": the server writes no binary log (log_bin is off), so it has no position',
            hint='set position = "best" in the job, or start the server with log_bin (point-in-time recovery needs it)',
        )
    obstacles = _obstacles(abilities, needs)
    if asked == "crash-consistent":
        if obstacles:
            raise NotQuiescedError(
                f'quiesce = "crash-consistent" is not safe here: {"; ".join(obstacles)}',
                hint='use "auto", which takes a lock',
            )
        return _lockless("asked for by the job; ", tail=needs.position and abilities.binlog)
    lock = _choose_lock(asked, abilities, needs)
    if needs.position:
        _refuse_inexact(lock, abilities, needs)
    lock = replace(lock, ways=_ways(asked, lock, needs, obstacles, stages=abilities.backup_stages))
    # Without a lock nobody tells how far a replica has executed its sources.
    if asked != "auto" or obstacles or (needs.position and needs.replica):
        return lock
    if not needs.position:
        return replace(_lockless("no position is wanted, and ", tail=False), instead=lock)
    return replace(lock, instead=_lockless(f"the {lock.level} was not free at once; ", tail=True))


def _choose_lock(asked: str, abilities: Abilities, needs: LockNeeds) -> LockChoice:
    able = abilities.backup_stages or abilities.instance_lock
    if asked == "backup-lock" and not able:
        raise NotQuiescedError(
            'quiesce = "backup-lock": this server knows neither BACKUP STAGE nor LOCK INSTANCE FOR BACKUP',
            hint='use "auto" or "global-read-lock"',
        )
    reason = "" if asked == "auto" else "asked for by the job; "
    freeze = asked == "freeze-process"
    if asked == "global-read-lock":
        return _global_read_lock(needs, reason, freeze=False)
    if not able:
        return _global_read_lock(needs, reason + "the server has no backup lock; ", freeze=freeze)
    too_weak = _why_stages_are_too_weak(needs) if abilities.backup_stages and asked != "backup-lock" else ""
    if too_weak:
        return _global_read_lock(needs, reason + too_weak, freeze=freeze)
    return _backup_lock(abilities, needs, reason, freeze=freeze)


def _refuse_inexact(lock: LockChoice, abilities: Abilities, needs: LockNeeds) -> None:
    """Raise NotQuiescedError if the position is not exact under `lock`."""
    if not lock.position:
        raise NotQuiescedError(
            f'position = "exact": under the {lock.level} of MariaDB no position is exact, because the binary log has '
            f"rows of {_list(needs.unstaged_engines)} before they are committed",
            hint='set quiesce = "auto" (global-read-lock waits for both) or position = "best" in the job, '
            "or convert these tables to InnoDB",
        )
    paused = lock.global_read_lock and needs.parallel_applier
    if abilities.flavor == "mariadb" and needs.applies and needs.other_engines and not paused:
        raise NotQuiescedError(
            f'position = "exact": the replica\'s applier writes tables of {_list(needs.other_engines)} ahead of the '
            "binary log, so that no position is exact",
            hint="set stop_replica = true in the job, which stops the applier for the snapshot, or "
            'position = "best", or convert these tables to InnoDB',
        )


def _ways(asked: str, lock: LockChoice, needs: LockNeeds, obstacles: Sequence[str], *, stages: bool) -> tuple[str, ...]:
    """Return what the owner can do so that a lock is easier to get, or not needed."""
    found: list[str] = []
    if not obstacles and asked != "auto":
        found.append(
            f'set quiesce = "crash-consistent", which takes no lock and is safe here (or "auto"; {asked} is set)'
        )
    elif needs.other_engines and len(obstacles) == 1:
        counts = needs.engines or {}
        tables = ", ".join(f"{counts.get(engine, 0)} of {engine}" for engine in needs.other_engines)
        found.append(f"convert the tables that are not InnoDB ({tables}): then no lock is needed")
    elif obstacles:
        found.append(f"change what makes a lock necessary ({'; '.join(obstacles)})")
    if stages and needs.position and lock.global_read_lock:
        found.append('set position = "best": then BACKUP STAGE suffices, which does not wait for InnoDB\'s statements')
    return tuple(found)


def _why_stages_are_too_weak(needs: LockNeeds) -> str:
    """Return why BACKUP STAGE does not give the required exact position; "" if it does."""
    if needs.position and needs.parallel_applier:
        # Under BLOCK_COMMIT such threads have written rows that the source's position does not cover yet.
        return "the replica applies with several threads, and they pause for this lock only; "
    if needs.position and needs.unstaged_engines:
        return (
            f"rows of {_list(needs.unstaged_engines)} are in the binary log before they are committed, and only "
            "this lock waits for both; "
        )
    return ""


def _backup_lock(abilities: Abilities, needs: LockNeeds, asked: str, *, freeze: bool) -> LockChoice:
    if not abilities.backup_stages:
        also = _FTWRL + " stops commits, so that the position is exact"
        if needs.other_engines:
            also = f"{_FTWRL} stops writers of {_list(needs.other_engines)} and commits, so that the position is exact"
        lock = _lock(needs, f"{asked}LOCK INSTANCE FOR BACKUP blocks DDL, {also}", freeze=freeze)
        return replace(
            lock,
            level="backup-lock",
            begin=("LOCK INSTANCE FOR BACKUP",),
            unlock=("UNLOCK TABLES", "UNLOCK INSTANCE"),
        )
    # Each stage is quick; only BLOCK_COMMIT stops all writers.
    stages: tuple[str, ...] = ("BACKUP STAGE FLUSH", "BACKUP STAGE BLOCK_DDL")
    # Commits must stop for an exact position, and so that none follows the flush.
    commits = needs.position or freeze or bool(needs.logs_apart)
    exact = commits and not needs.unstaged_engines
    if commits:
        stages += ("BACKUP STAGE BLOCK_COMMIT",)
        why = "BACKUP STAGE BLOCK_COMMIT stops commits only, and makes the position exact"
        if not exact:
            why = (
                "BACKUP STAGE BLOCK_COMMIT stops commits only, and no position is exact under it: the binary log has "
                f"rows of {_list(needs.unstaged_engines)} before they are committed (global-read-lock waits for both)"
            )
    else:
        why = f"no position is wanted: BACKUP STAGE BLOCK_DDL stops writers of {_list(needs.other_engines)} only"
    return replace(
        _lock(needs, asked + why, freeze=freeze),
        level="backup-lock",
        position=exact,
        begin=("BACKUP STAGE START",),
        lock=stages,
        unlock=("BACKUP STAGE END",),
    )


def _global_read_lock(needs: LockNeeds, asked: str, *, freeze: bool) -> LockChoice:
    return _lock(needs, f"{asked}{_FTWRL} stops all writers, and makes the position exact", freeze=freeze)


def _lock(needs: LockNeeds, why: str, *, freeze: bool) -> LockChoice:
    """Return FLUSH TABLES WITH READ LOCK, with the further steps that the snapshot's needs require of every lock."""
    return LockChoice(
        level="global-read-lock",
        why=why + _why_flush(needs),
        freeze=freeze,
        only_innodb=not needs.other_engines,
        lock=(_FTWRL,),
        flush=_flush(needs),
        redo_lags=needs.redo_lags,
        unlock=("UNLOCK TABLES",),
    )


def _lockless(asked: str, *, tail: bool) -> LockChoice:
    why = "all tables are InnoDB and all files of the server are on one volume: crash recovery repairs them"
    if tail:
        why += "; the position is where the snapshot's own binlog ends"
    return LockChoice(level="crash-consistent", why=asked + why, position=False, tail=tail)


def _flush(needs: LockNeeds) -> tuple[str, ...]:
    # Without it the data hold prepared transactions whose commit is only in the binlog; if that is missing or older,
    # recovery rolls them back (MySQL) or refuses to start (MariaDB).
    # And if the redo log is written once a second, both lose transactions that the binlog has as committed.
    return (_FLUSH_LOGS,) if needs.logs_apart or needs.redo_lags else ()


def _why_flush(needs: LockNeeds) -> str:
    reasons = [f"{', '.join(needs.logs_apart)} is from another instant"] if needs.logs_apart else []
    reasons += [f"{REDO_AT_COMMIT} is 0"] if needs.redo_lags else []
    return f"; the engines' logs are flushed under it, because {' and '.join(reasons)}" if reasons else ""


def _obstacles(abilities: Abilities, needs: LockNeeds) -> list[str]:
    """Return the reasons why a snapshot without a lock would not be consistent, or its position not exact."""
    found: list[str] = []
    if abilities.flavor == "mysql" and not abilities.instance_lock:
        found.append("without LOCK INSTANCE FOR BACKUP we cannot tell whether DDL is under way")
    if needs.engines is None or needs.settings is None:
        found.append("its tables and settings are unknown")
        return found
    if needs.other_engines:
        found.append(f"there are tables of {_list(needs.other_engines)}")
    if needs.logs_apart:
        found.append(f"its logs in {', '.join(needs.logs_apart)} are not on the volume of the data")
    if not needs.atomic:
        found.append("the storage does not snapshot all files of the server in one instant")
    if needs.position and abilities.binlog:
        # Otherwise the data may be ahead of the binlog (seen: by 509 transactions), or the binlog ahead of the data.
        found += [
            f"{name} is {needs.settings.get(name, '?')}, not 1"
            for name in _ALWAYS_SYNCED
            if needs.settings.get(name) != "1"
        ]
        found += [f"{name} is ON" for name in _ENCRYPTED if is_on(needs.settings.get(name))]
        if needs.replica and abilities.flavor == "mysql":
            # Transactions of its source are in its GTIDs, but not in its binary logs.
            names = _LOGS_WHAT_IT_REPLICATES
            found += [f"{name} is OFF" for name in names if needs.settings.get(name, "").upper() in ("OFF", "0")]
    return found


def _list(engines: tuple[str, ...]) -> str:
    more = len(engines) - _SHOWN_ENGINES
    return ", ".join(engines[:_SHOWN_ENGINES]) + (f" and {more} more" if more > 0 else "")
