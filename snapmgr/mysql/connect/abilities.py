"""Asks a server which statements and variables it has.

We never guess from the version: forks number theirs freely, and statements come and go within a series. A server
has a counter Com_… for each kind of statement that its parser knows; reading the counters takes no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.contract.errors import NotQuiescedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.connect.identity import ServerIdentity

_COUNTERS = (
    "Com_backup",
    "Com_lock_instance",
    "Com_show_binary_log_status",
    "Com_show_replica_status",
)
ABILITIES = ("log_bin", "max_statement_time", "wsrep_on", "wsrep_provider", "group_replication_group_name")
"""Variables that tell what a server can do."""


class Abilities(Struct, frozen=True, kw_only=True):
    """The statements that a server understands, and its cluster."""

    flavor: Literal["mariadb", "mysql"]
    backup_stages: bool
    """BACKUP STAGE (MariaDB 10.4 on)."""
    instance_lock: bool
    """LOCK INSTANCE FOR BACKUP (MySQL 8.0 on)."""
    statement_time: bool
    """max_statement_time, which bounds every statement (MariaDB); MySQL can bound only SELECT."""
    binlog: bool
    """Whether it writes binary logs."""
    binlog_status: str
    """The statement that shows the binlog position."""
    replica_status: str
    """The statement that shows its sources, a row for each."""
    replica_word: Literal["REPLICA", "SLAVE"]
    """The word of STOP REPLICA and START REPLICA."""
    cluster: str | None
    """The kind of cluster that it is a member of; None: not a member."""

    def refuse_cluster(self) -> None:
        """Raise NotQuiescedError for a member of a cluster: snapmgr was never tested there."""
        if self.cluster is not None:
            raise NotQuiescedError(
                f"the server is a member of a {self.cluster} cluster: a lock may stall the whole cluster or make it "
                "drop this member, and snapmgr was never tested there",
                hint='snapshot an asynchronous replica of it, or a stopped member (quiesce = "stopped")',
            )


def probe_abilities(
    connection: Connection, identity: ServerIdentity, variables: Mapping[str, str] | None = None
) -> Abilities:
    """Ask a server for its abilities. Takes no lock and needs no privilege. Raises MysqlError.

    `variables` holds at least ABILITIES, just read on this connection; without it, this reads them.
    """
    counters = connection.status(*_COUNTERS)
    values = connection.variables(*ABILITIES) if variables is None else variables
    mysql = identity.flavor == "mysql"
    modern = "com_show_replica_status" in counters
    return Abilities(
        flavor=identity.flavor,
        backup_stages="com_backup" in counters,
        instance_lock="com_lock_instance" in counters,
        statement_time="max_statement_time" in values,
        binlog=is_on(values.get("log_bin")),
        binlog_status="SHOW BINARY LOG STATUS" if "com_show_binary_log_status" in counters else "SHOW MASTER STATUS",
        replica_status=("SHOW REPLICA STATUS" if modern else "SHOW SLAVE STATUS")
        if mysql
        else "SHOW ALL SLAVES STATUS",
        replica_word="REPLICA" if mysql and modern else "SLAVE",
        cluster=_cluster(values),
    )


def is_on(value: str | None) -> bool:
    """Return whether a server variable is on; a variable that the server does not have (None) is not."""
    return value is not None and value.upper() in ("ON", "1")


def _cluster(values: Mapping[str, str]) -> str | None:
    if is_on(values.get("wsrep_on")) and values.get("wsrep_provider", "none") not in ("", "none"):
        return "Galera"
    # The variable exists once the plugin is loaded, and is empty until a group is named.
    return "Group Replication" if values.get("group_replication_group_name") else None
