"""Parsing a replica's status, and which of its positions are exact."""

from __future__ import annotations

from typing import Any

import pytest

from snapmgr.catalog.manifest import SourcePosition
from snapmgr.mysql.lock.replication import (
    Applier,
    mariadb_position,
    mysql_position,
    name_inexact,
    name_problems,
    parse_channels,
)

# Recorded, without the columns that nobody asks for.
MARIADB: dict[str, Any] = {
    "Connection_name": "west",
    "Master_Host": "127.0.0.1",
    "Master_Port": 49769,
    "Master_Log_File": "binlog.000003",
    "Read_Master_Log_Pos": 9210,
    "Relay_Master_Log_File": "binlog.000001",
    "Slave_IO_Running": "Connecting",
    "Slave_SQL_Running": "Yes",
    "Exec_Master_Log_Pos": 921,
    "Until_Condition": "None",
    "Last_SQL_Errno": 0,
    "Last_SQL_Error": "",
    "Using_Gtid": "Slave_Pos",
    "Gtid_Slave_Pos": "0-101-4",
}
MYSQL: dict[str, Any] = {
    "Source_Host": "127.0.0.1",
    "Source_Port": 49193,
    "Source_Log_File": "binlog.000007",
    "Read_Source_Log_Pos": 10760,
    "Relay_Source_Log_File": "binlog.000001",
    "Replica_IO_Running": "No",
    "Replica_SQL_Running": "Yes",
    "Exec_Source_Log_Pos": 1076,
    "Until_Condition": "None",
    "Last_SQL_Errno": 0,
    "Last_SQL_Error": "",
    "Retrieved_Gtid_Set": "d159dd45-e5cc-11f1-902c-02fc00000001:3-40",
    "Executed_Gtid_Set": "d159dd45-e5cc-11f1-902c-02fc00000001:3-4,\nd159dd45-e5cc-11f1-902c-02fc00000002:1",
    "Auto_Position": 1,
    "Channel_Name": "",
}
# Until 8.0.21.
OLD_MYSQL = {name.replace("Source", "Master").replace("Replica_", "Slave_"): value for name, value in MYSQL.items()} | {
    "Auto_Position": 0
}
ORDERED, SERIAL, UNORDERED = (
    Applier(workers=4, in_order=True),
    Applier(workers=0, in_order=True),
    Applier(workers=4, in_order=False),
)
GTIDS = "d159dd45-e5cc-11f1-902c-02fc00000001:3-4,d159dd45-e5cc-11f1-902c-02fc00000002:1"


def mysql(**changes: object) -> Any:
    (channel,) = parse_channels([MYSQL | changes])
    return channel


def mariadb(**changes: object) -> Any:
    (channel,) = parse_channels([MARIADB | changes])
    return channel


def known(position: SourcePosition) -> tuple[str, int, str]:
    return position.file, position.offset, position.gtid


def test_executed_counts_and_not_received():
    channel = mariadb()
    assert (channel.name, channel.host, channel.port) == ("west", "127.0.0.1", 49769)
    assert (channel.file, channel.offset) == ("binlog.000001", 921)
    assert channel.applies
    assert channel.by_gtid
    assert not channel.until
    channel = mysql()
    assert (channel.file, channel.offset, channel.gtid) == ("binlog.000001", 1076, GTIDS)
    assert channel.applies


def test_older_column_names_say_the_same():
    (old,) = parse_channels([OLD_MYSQL])
    assert old == mysql(Auto_Position=0)


def test_a_channel_that_never_ran_has_executed_nothing():
    at = mysql_position(
        mysql(Relay_Source_Log_File="", Exec_Source_Log_Pos=0, Executed_Gtid_Set="", Replica_SQL_Running="No"),
        ORDERED,
        (),
        only_innodb=True,
    )
    assert known(at) == ("", 0, "")
    assert name_inexact([at]) != ()


@pytest.mark.parametrize(
    ("changes", "applier", "workers", "only_innodb", "expected"),
    [
        ({}, ORDERED, (("binlog.000001", 9000),), True, ("", 0, GTIDS)),
        ({"Replica_SQL_Running": "No"}, UNORDERED, (("binlog.000001", 900),), False, ("binlog.000001", 1076, GTIDS)),
        # Ended by a crash: workers were further than the last checkpoint.
        ({"Replica_SQL_Running": "No"}, UNORDERED, (("binlog.000001", 9000),), True, ("", 0, GTIDS)),
        ({"Replica_SQL_Running": "No"}, ORDERED, None, True, ("", 0, GTIDS)),
        ({"Auto_Position": 0}, ORDERED, (("binlog.000001", 9000),), True, ("binlog.000001", 9000, "")),
        (
            {"Auto_Position": 0},
            ORDERED,
            (("binlog.999999", 9000), ("binlog.1000000", 4)),
            True,
            ("binlog.1000000", 4, ""),
        ),
        ({"Auto_Position": 0}, ORDERED, (("binlog.000001", 9000),), False, ("", 0, "")),
        ({"Auto_Position": 0}, UNORDERED, (("binlog.000001", 9000),), True, ("", 0, "")),
        ({"Auto_Position": 0}, ORDERED, None, True, ("", 0, "")),
        ({"Auto_Position": 0, "Replica_SQL_Running": "No", "Last_SQL_Error": "x"}, UNORDERED, (), True, ("", 0, "")),
    ],
)
def test_what_is_exact_of_a_mysql_channel(
    changes: dict[str, object],
    applier: Applier,
    workers: tuple[tuple[str, int], ...] | None,
    only_innodb: bool,
    expected: tuple[str, int, str],
):
    assert known(mysql_position(mysql(**changes), applier, workers, only_innodb=only_innodb)) == expected


@pytest.mark.parametrize(
    ("changes", "applier", "global_read_lock", "expected"),
    [
        ({}, ORDERED, False, ("", 0, "0-101-4")),
        # Domains may be executed one ahead of another.
        ({}, ORDERED, True, ("", 0, "0-101-4")),
        ({}, SERIAL, False, ("binlog.000001", 921, "0-101-4")),
        ({"Using_Gtid": "No"}, SERIAL, False, ("binlog.000001", 921, "")),
        ({"Using_Gtid": "No"}, ORDERED, False, ("", 0, "")),
        ({"Using_Gtid": "No"}, ORDERED, True, ("binlog.000001", 921, "")),
        ({"Using_Gtid": "No", "Slave_SQL_Running": "No"}, ORDERED, False, ("binlog.000001", 921, "")),
    ],
)
def test_what_is_exact_of_a_mariadb_connection(
    changes: dict[str, object], applier: Applier, global_read_lock: bool, expected: tuple[str, int, str]
):
    assert (
        known(mariadb_position(mariadb(**changes), applier, "0-101-4", global_read_lock=global_read_lock)) == expected
    )


def test_an_applier_that_broke_is_named_with_its_error():
    error = "Could not execute Write_rows_v1 event on table d.t; Duplicate entry '1' for key 'PRIMARY'" + "x" * 5000
    broken = mariadb(Last_SQL_Error=error, Last_SQL_Errno=1062, Slave_SQL_Running="No")
    (line,) = name_problems([broken, mariadb()])
    assert '127.0.0.1:49769 (channel "west")' in line
    assert "Duplicate entry" in line
    assert len(line) < 500
