"""Runs mariadb-backup, MariaDB's own tool."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from snapmgr.catalog.manifest import Position, SourcePosition
from snapmgr.mysql.connect.client import MysqlError
from snapmgr.physical.tools.copytool import CopyTool
from snapmgr.physical.tools.infofile import SlaveInfo, read_slave_info

if TYPE_CHECKING:
    from snapmgr.catalog.physical import ToolName
    from snapmgr.mysql.lock.replication import Channel
    from snapmgr.physical.tools.request import BackupInfo
    from snapmgr.physical.tools.source import BackupSource


class MariabackupTool(CopyTool):
    """mariadb-backup; see `tools.request.Tool`. The tool asks the server for its settings.

    An increment can be applied to every prepared backup.
    """

    name: ToolName = "mariadb-backup"
    programs: ClassVar[tuple[str, ...]] = ("mariadb-backup", "mariabackup")
    package: ClassVar[str] = "mariadb-backup"

    def why_inexact(self, source: BackupSource) -> str:
        """Return why a position read under BACKUP STAGE is not exact; "" if it is."""
        return source.why_inexact()

    def positions(
        self, source: BackupSource, info: BackupInfo, folder: str
    ) -> tuple[Position | None, tuple[SourcePosition, ...]]:
        """Return the exact positions among those that the tool read while commits were blocked."""
        position = info.position
        if position is not None:
            # The tool records gtid_current_pos, which on a replica differs from its own binary log.
            position = Position(file=position.file, offset=position.offset, gtid=_gtid_at(source, position))
        return position, exact_sources(source.channels, read_slave_info(folder))


def exact_sources(channels: tuple[Channel, ...], info: SlaveInfo) -> tuple[SourcePosition, ...]:
    """Return the known positions of a replica's sources, from the server and the tool's record. Pure."""
    found = []
    for channel in channels:
        file, offset = info.files.get(channel.name, ("", 0))
        gtid = info.gtid if channel.by_gtid else ""
        if file or gtid:
            found.append(
                SourcePosition(
                    channel=channel.name, host=channel.host, port=channel.port, file=file, offset=offset, gtid=gtid
                )
            )
    return tuple(found)


def _gtid_at(source: BackupSource, position: Position) -> str:
    """Return the GTID of a place in the server's binary log; "" if the server has none."""
    gtid: object = ""
    # The server reads the file up to that place. If the file is already gone, the backup is complete without it.
    with suppress(MysqlError):
        gtid = source.connection.value("SELECT BINLOG_GTID_POS(%s, %s)", (position.file, position.offset))
    return gtid.decode() if isinstance(gtid, bytes) else str(gtid or "")
