"""Reads the binlog position that the server reports, with the id of the reading connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.catalog.manifest import Position

if TYPE_CHECKING:
    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.datadir.origin import Flavor

_GTID: dict[Flavor, str] = {"mariadb": "@@GLOBAL.gtid_binlog_pos", "mysql": "@@GLOBAL.gtid_executed"}


class PositionReading(Struct, frozen=True, kw_only=True):
    """The position at one moment, and the connection that read it."""

    connection_id: int
    position: Position | None
    """None when the server writes no binary log."""


def read_position(connection: Connection, abilities: Abilities) -> PositionReading:
    """Read the position and this connection's id: two round trips, cheap enough for a lock.

    Exact only while commits are blocked (BACKUP STAGE BLOCK_COMMIT or FLUSH TABLES WITH READ LOCK). Otherwise it was
    measured to be wrong by up to 8 transactions. Raises MysqlError.
    """
    session = connection.rows(f"SELECT CONNECTION_ID() AS id, {_GTID[abilities.flavor]} AS gtid")[0]
    status = connection.rows(abilities.binlog_status)
    position = None
    if status:
        position = Position(
            file=str(status[0]["File"]),
            offset=int(str(status[0]["Position"])),
            gtid=one_line(session["gtid"]),
        )
    return PositionReading(connection_id=int(str(session["id"])), position=position)


def read_gtid(connection: Connection, flavor: Flavor) -> str:
    """Return the GTIDs of all transactions that a server has executed, on one line; "" for none. Raises MysqlError."""
    return one_line(connection.value(f"SELECT {_GTID[flavor]}"))


def one_line(gtids: object) -> str:
    """Return GTIDs as a server printed them ("" for NULL), without the line breaks in MySQL's long sets."""
    return "".join(str(gtids or "").split())
