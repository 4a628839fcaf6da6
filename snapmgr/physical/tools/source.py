"""Connects to the server that a tool backs up: checks its identity, and reads what the backup depends on."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import MissingRequirementError, NotQuiescedError
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.datadir.layout import read_layout
from snapmgr.mysql.lock.levels import LockNeeds
from snapmgr.mysql.lock.replication import applies_in_parallel, read_channels, rows_are_ahead
from snapmgr.physical.tools.request import BrokenChainError
from snapmgr.physical.tools.toolreason import missing_privileges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.mysql.connect.abilities import Abilities
    from snapmgr.mysql.connect.client import Connection, Credentials
    from snapmgr.mysql.connect.identity import ServerIdentity
    from snapmgr.mysql.datadir.layout import ServerLayout
    from snapmgr.mysql.lock.replication import Channel

_REDO_NAMES = ("innodb_log_file_size", "innodb_log_files_in_group", "innodb_redo_log_capacity")
_LSN_NAMES = ("Innodb_lsn_current", "Innodb_redo_log_current_lsn")
_DATA_SUFFIXES = (
    *(".ibd", ".ibu", ".MYD", ".MYI", ".MAD", ".MAI", ".CSV", ".CSM", ".ARZ", ".ARM", ".frm", ".sdi", ".ibt"),
)
_DATA_PREFIXES = ("ibdata", "undo", "aria_log")
_TIME_LIMIT_S = 60.0
_IDLE_LIMIT_S = 7 * 86400
_SHOWN = 3


class BackupSource(Struct, frozen=True, kw_only=True):
    """A connected server and everything that its backup depends on."""

    connection: Connection
    identity: ServerIdentity
    abilities: Abilities
    layout: ServerLayout
    channels: tuple[Channel, ...]
    account: str
    """The account, as in GRANT … TO."""

    @property
    def needs(self) -> LockNeeds:
        """The server's tables by engine, as the choice of a lock takes them."""
        return LockNeeds(engines=self.layout.engines)

    def current_lsn(self) -> int | None:
        """Return the LSN up to which the server has written its redo log; None if unknown."""
        with suppress(MysqlError, ValueError):
            values = self.connection.status(*_LSN_NAMES)
            return next((int(value) for value in values.values()), None)
        return None

    def redo_bytes(self) -> int | None:
        """Return the maximum size of the server's redo log; None if unknown. Raises MysqlError."""
        values = self.connection.variables(*_REDO_NAMES)
        if "innodb_redo_log_capacity" in values:
            return int(values["innodb_redo_log_capacity"])
        if "innodb_log_file_size" not in values:
            return None
        return int(values["innodb_log_file_size"]) * int(values.get("innodb_log_files_in_group", "1"))

    def require_lsn(self, from_lsn: int) -> None:
        """Raise BrokenChainError if the server has not reached `from_lsn` yet: its data were replaced.

        The tools would silently make an empty increment (tested).
        """
        now = self.current_lsn()
        if from_lsn and now is not None and now < from_lsn:
            raise BrokenChainError(
                f"the server's log is at LSN {now}, but the last backup ended at {from_lsn}: these are other data",
                hint="a full backup is needed",
            )

    def data_bytes(self) -> int:
        """Return the approximate size of the data to copy."""
        total = 0
        for folder, _, names in os.walk(self.identity.datadir):
            for name in names:
                if name.endswith(_DATA_SUFFIXES) or name.startswith(_DATA_PREFIXES):
                    with suppress(OSError):
                        total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def why_inexact(self) -> str:
        """Return why positions are not exact although BACKUP STAGE blocks commits; "" if they are. Raises MysqlError.

        The reasons are those of `snapmgr.mysql.lock.levels`; each was measured.
        """
        needs = self.needs
        if needs.unstaged_engines:
            return f"rows of {', '.join(needs.unstaged_engines)} are in the binary log before they are committed"
        if applies_in_parallel(self.connection, self.channels):
            return "several threads execute what the source sends"
        if rows_are_ahead(
            self.connection,
            self.abilities,
            self.channels,
            global_read_lock=False,
            only_innodb=not needs.other_engines,
        ):
            return "the replica writes to tables that are not InnoDB"
        return ""


@contextmanager
def open_source(credentials: Credentials, identity: ServerIdentity, tool: str) -> Iterator[BackupSource]:
    """Connect to the expected server, and read what its backup depends on.

    Raises NotQuiescedError for another server, or one of a cluster; MissingRequirementError for a missing right, with
    the statement that grants it, and for tablespaces outside of the datadir.
    """
    with connect(credentials, timeout_s=_TIME_LIMIT_S) as connection:
        # A copy may take hours, during which this connection is idle.
        connection.execute(f"SET SESSION wait_timeout = {_IDLE_LIMIT_S}")
        found = identify(connection)
        if (found.pid, found.start_ticks, found.datadir) != (identity.pid, identity.start_ticks, identity.datadir):
            raise NotQuiescedError(
                f"at {found.socket} answers process {found.pid} with the datadir {found.datadir}, instead of process "
                f"{identity.pid} with {identity.datadir}",
                hint="was the server restarted, or is it the socket of another one? Try again",
            )
        user, _, host = str(connection.value("SELECT CURRENT_USER()")).rpartition("@")
        account = f"'{user}'@'{host}'"
        abilities = probe_abilities(connection, found)
        abilities.refuse_cluster()
        with _granting(account):
            # Check it now, because the tools need it only at the very end of the copy.
            connection.rows(abilities.binlog_status)
            channels = read_channels(connection, abilities)
            layout = read_layout(connection, found)
        outside = [place.path for place in layout.places if place.what == "tablespace"]
        if outside:
            more = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
            raise MissingRequirementError(
                f"tablespaces lie outside of the datadir, so that {tool} would leave their copies tied to the live "
                f"files: {', '.join(outside[:_SHOWN])}{more}",
                hint="use a snapshot job (source = mysql), which takes them as they are",
            )
        yield BackupSource(
            connection=connection,
            identity=found,
            abilities=abilities,
            layout=layout,
            channels=channels,
            account=account,
        )


@contextmanager
def _granting(account: str) -> Iterator[None]:
    """Turn the server's refusal into the statement that grants the right."""
    try:
        yield
    except ConnectionLostError:
        raise
    except MysqlError as error:
        needed = missing_privileges([error.message])
        if not needed:
            raise
        raise MissingRequirementError(
            f"the account lacks rights: {', '.join(needed)} ({error.message})",
            hint=f"GRANT {', '.join(needed)} ON *.* TO {account};",
        ) from None
