"""Checks the privileges of a job's account, and writes the GRANT statements for missing ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.mysql.connect.client import MysqlError, quote
from snapmgr.mysql.lock.replication import parse_channels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr.config.model import Job
    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection

_GRANT = re.compile(r"GRANT (?P<privileges>.+?) ON (?P<scope>\S+) TO ", re.IGNORECASE)
_EVERYWHERE = "*.*"
Replicates = Literal["", "by GTID", "by file", "somehow"]
"""How a server replicates from another one; "": it does not. "somehow": the account may not see how."""
_PERFORMANCE_SCHEMA = "performance_schema.*"


class Privilege(Struct, frozen=True, kw_only=True):
    """A privilege that a job needs."""

    name: str
    why: str
    instead: frozenset[str] = frozenset()
    """Other privileges that include it."""
    scope: str = _EVERYWHERE

    def __str__(self) -> str:
        """Describe it: "RELOAD (BACKUP STAGE)", "SELECT ON mysql.gtid_slave_pos (the source's GTID)"."""
        on = "" if self.scope == _EVERYWHERE else f" ON {self.scope}"
        return f"{self.name}{on} ({self.why})"


def needed_privileges(job: Job, abilities: Abilities, *, replica: Replicates) -> tuple[Privilege, ...]:
    """Return the privileges that the account of `job` needs: from the manuals of GRANT, each tested by leaving it out.

    Args:
        job: whether it stops the applier or kills SELECTs.
        abilities: those of the server.
        replica: how the server replicates from another one.
    """
    mariadb = abilities.flavor == "mariadb"
    needed = [Privilege(name="RELOAD", why="FLUSH TABLES WITH READ LOCK" if not mariadb else "BACKUP STAGE")]
    if mariadb:
        monitor = frozenset({"REPLICATION CLIENT", "SUPER"})
        needed.append(Privilege(name="BINLOG MONITOR", why="the binlog position", instead=monitor))
        if replica:
            # Its name before 10.5, and privileges that include it.
            old = frozenset({"REPLICA MONITOR", "REPLICATION SLAVE ADMIN", "REPLICATION REPLICA ADMIN", "SUPER"})
            needed.append(Privilege(name="SLAVE MONITOR", why="the source's position", instead=old))
    else:
        if abilities.instance_lock:
            needed.insert(0, Privilege(name="BACKUP_ADMIN", why="LOCK INSTANCE FOR BACKUP"))
        needed.append(Privilege(name="REPLICATION CLIENT", why="the binlog position", instead=frozenset({"SUPER"})))
    needed.append(Privilege(name="PROCESS", why="InnoDB's tablespaces, which may be outside the datadir"))
    if job.stop_replica and replica:
        name = "REPLICATION SLAVE ADMIN" if mariadb else "REPLICATION_SLAVE_ADMIN"
        enough = frozenset({"SUPER", "REPLICATION REPLICA ADMIN"})
        needed.append(Privilege(name=name, why="stop_replica", instead=enough))
    if job.kill_selects_after_s is not None:
        name = "CONNECTION ADMIN" if mariadb else "CONNECTION_ADMIN"
        needed.append(Privilege(name=name, why="kill_selects_after", instead=frozenset({"SUPER"})))
    if replica == "by file" and not mariadb:
        why = "the source's file and offset"
        needed.append(Privilege(name="SELECT", why=why, scope="mysql.slave_worker_info"))
    if replica == "by GTID" and mariadb and job.quiesce in ("backup-lock", "freeze-process"):
        needed.append(Privilege(name="SELECT", why="the source's GTID", scope="mysql.gtid_slave_pos"))
    if not mariadb:
        needed.append(Privilege(name="SELECT", why="to see what would delay the lock", scope=_PERFORMANCE_SCHEMA))
    return tuple(needed)


def replicates(connection: Connection, abilities: Abilities) -> Replicates:
    """Return how the server replicates from another one, as far as the account may see it."""
    try:
        channels = parse_channels(connection.rows(abilities.replica_status))
    except MysqlError:
        # Without the privilege to see the sources, an account can still see how many of them are connected.
        running = connection.status("Slaves_running").get("slaves_running", "0")
        return "somehow" if running not in ("0", "OFF") else ""
    if not channels:
        return ""
    return "by GTID" if all(channel.by_gtid for channel in channels) else "by file"


def missing_privileges(grants: Iterable[str], needed: Iterable[Privilege]) -> tuple[Privilege, ...]:
    """Given the lines of SHOW GRANTS (they include those of active roles), return the privileges that are missing."""
    needed = tuple(needed)
    held: dict[str, set[str]] = {scope: set() for scope in (_EVERYWHERE, *(one.scope for one in needed))}
    for line in grants:
        match = _GRANT.match(line)
        scope = match["scope"].replace("`", "") if match else ""
        if match and scope in held:
            held[scope] |= {privilege.strip().upper() for privilege in match["privileges"].split(",")}
    everywhere = held[_EVERYWHERE]
    if everywhere & {"ALL PRIVILEGES", "ALL"}:
        return ()
    return tuple(one for one in needed if not (everywhere | held[one.scope]) & (one.instead | {one.name}))


def read_grants(connection: Connection) -> list[str]:
    """Return the lines of SHOW GRANTS. They contain password hashes: use them only for `missing_privileges`."""
    return [str(next(iter(row.values()))) for row in connection.rows("SHOW GRANTS")]


def grant_statements(account: str, privileges: Iterable[Privilege]) -> str:
    """Given CURRENT_USER() ("snapmgr@localhost") and privileges, return the GRANT statements for an administrator."""
    user, _, host = account.rpartition("@")
    by_scope: dict[str, list[str]] = {}
    for one in privileges:
        by_scope.setdefault(one.scope, []).append(one.name)
    return " ".join(
        f"GRANT {', '.join(names)} ON {scope} TO {quote(user)}@{quote(host)};" for scope, names in by_scope.items()
    )
