"""Defines records of the binary log events that begin, end and identify transactions."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Literal

from msgspec import Struct

from snapmgr.mysql.binlog.gtid import MariadbGtid, MysqlGtidSet

Flavor = Literal["mariadb", "mysql"]

MAGIC = b"\xfebin"
MYSQL_ENCRYPTED_MAGIC = b"\xfdbin"
HEADER = struct.Struct("<IBIIIH")
"""Every event's header: timestamp, type, server id, length with header and checksum, end position, flags."""
FLAG_IN_USE = 0x01
"""Flag of a Format_description: the server has the file open, or had it open when it crashed."""
CHECKSUM_NONE, CHECKSUM_CRC32 = 0, 1
CHECKSUM_BYTES = 4
FLAG_STANDALONE, FLAG_COMMIT_ID = 0x01, 0x02
"""Flags of a MariaDB GTID."""


class EventType(IntEnum):
    """The types that we decode, or whose place among transactions matters."""

    QUERY = 2
    STOP = 3
    ROTATE = 4
    INTVAR = 5
    RAND = 13
    USER_VAR = 14
    FORMAT_DESCRIPTION = 15
    XID = 16
    TABLE_MAP = 19
    INCIDENT = 26
    HEARTBEAT = 27
    IGNORABLE = 28
    ROWS_QUERY = 29
    MYSQL_GTID = 33
    ANONYMOUS_GTID = 34
    PREVIOUS_GTIDS = 35
    XA_PREPARE = 38
    TRANSACTION_PAYLOAD = 40
    HEARTBEAT_V2 = 41
    MYSQL_TAGGED_GTID = 42
    ANNOTATE_ROWS = 160
    BINLOG_CHECKPOINT = 161
    MARIADB_GTID = 162
    GTID_LIST = 163
    START_ENCRYPTION = 164


class FormatDescription(Struct, frozen=True, kw_only=True):
    """The first event: the server that wrote the file, and its format."""

    server_version: str
    flavor: Flavor
    created: int
    """Seconds since the epoch; 0 if a rotation began the file, not a start of the server."""
    checksum: int
    """CHECKSUM_NONE or CHECKSUM_CRC32, for all later events; this event always has a checksum."""
    post_header_bytes: bytes
    """Lengths for each event type, from type 1."""
    in_use: bool


class Rotate(Struct, frozen=True, kw_only=True):
    """The file's last event: another one follows."""

    next_file: str
    position: int


class PreviousGtids(Struct, frozen=True, kw_only=True):
    """All GTIDs of the files before (MySQL)."""

    gtids: MysqlGtidSet


class GtidList(Struct, frozen=True, kw_only=True):
    """The last GTID of each domain and server of the files before (MariaDB); within a domain, the latest comes last."""

    gtids: tuple[MariadbGtid, ...]


class MysqlTransaction(Struct, frozen=True, kw_only=True):
    """The beginning of a MySQL transaction, with a GTID or anonymous."""

    uuid: str
    """ "" if it is anonymous."""
    number: int
    """0 if it is anonymous."""
    tag: str = ""
    last_committed: int | None = None
    sequence_number: int | None = None
    committed_us: int | None = None
    """When this server committed it: microseconds since the epoch, MySQL 8 and newer."""
    originally_committed_us: int | None = None
    """When it was first committed, on its original server."""


class MariadbTransaction(Struct, frozen=True, kw_only=True):
    """The beginning of a MariaDB transaction."""

    gtid: MariadbGtid
    flags: int
    commit_id: int | None
    """Id of a group commit of two or more transactions."""

    @property
    def standalone(self) -> bool:
        """Whether it is a single statement without an end event (DDL and the like)."""
        return bool(self.flags & FLAG_STANDALONE)


class Query(Struct, frozen=True, kw_only=True):
    """A statement as text."""

    kind: Literal["begin", "commit", "rollback", "xa-start", "other"]


class Xid(Struct, frozen=True, kw_only=True):
    """The end of a transaction in engines that can prepare: it is committed."""

    xid: int


class XaPrepare(Struct, frozen=True, kw_only=True):
    """The end of an XA transaction: prepared, or directly committed if `one_phase`."""

    one_phase: bool


class TransactionPayload(Struct, frozen=True, kw_only=True):
    """All events of a MySQL transaction, its end included, compressed into one."""


class StartEncryption(Struct, frozen=True, kw_only=True):
    """All later events are encrypted (MariaDB)."""

    scheme: int
    key_version: int


Body = (
    FormatDescription
    | Rotate
    | PreviousGtids
    | GtidList
    | MysqlTransaction
    | MariadbTransaction
    | Query
    | Xid
    | XaPrepare
    | TransactionPayload
    | StartEncryption
)
