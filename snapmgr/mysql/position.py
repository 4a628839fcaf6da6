"""The binlog position as the server itself states it, with the identity of the connection that asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.manifest import Position

if TYPE_CHECKING:
    from snapmgr.mysql.abilities import Abilities
    from snapmgr.mysql.client import Connection


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What one connection saw at one moment."""

    connection_id: int
    position: Position | None
    """None when the server writes no binary log."""


def sight(connection: Connection, abilities: Abilities) -> Sighting:
    """Read the position and this connection's id: two round trips, so that it is cheap under a lock.

    Exact only while commits are blocked (BACKUP STAGE BLOCK_COMMIT or FLUSH TABLES WITH READ LOCK); otherwise it was
    measured to be wrong by up to 8 transactions. Raises MysqlError.
    """
    gtid = "@@GLOBAL.gtid_binlog_pos" if abilities.flavor == "mariadb" else "@@GLOBAL.gtid_executed"
    session = connection.rows(f"SELECT CONNECTION_ID() AS id, {gtid} AS gtid")[0]
    status = connection.rows(abilities.binlog_status)
    position = None
    if status:
        position = Position(
            file=str(status[0]["File"]),
            offset=int(str(status[0]["Position"])),
            # MySQL breaks long sets into lines.
            gtid="".join(str(session["gtid"] or "").split()),
        )
    return Sighting(connection_id=int(str(session["id"])), position=position)
