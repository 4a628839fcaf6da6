"""Privileges that an account is missing, from the lines of SHOW GRANTS."""

from __future__ import annotations

import pytest

from snapmgr.config.model import Job
from snapmgr.doctor.account import Privilege, grant_statements, missing_privileges, needed_privileges
from support.sample import abilities_of

MARIADB, MYSQL = abilities_of("mariadb"), abilities_of("mysql")
JOB = Job(source="mysql")


def lacking(grants, server, job=JOB, *, replica=""):
    return [one.name for one in missing_privileges(grants, needed_privileges(job, server, replica=replica))]


@pytest.mark.parametrize(
    ("grants", "missing"),
    [
        (["GRANT ALL PRIVILEGES ON *.* TO `root`@`localhost` IDENTIFIED VIA unix_socket WITH GRANT OPTION"], []),
        (["GRANT USAGE ON *.* TO `a`@`localhost`"], ["RELOAD", "BINLOG MONITOR", "PROCESS"]),
        (["GRANT RELOAD, PROCESS, BINLOG MONITOR ON *.* TO `a`@`localhost` IDENTIFIED BY PASSWORD '*1'"], []),
        # A role's, as SHOW GRANTS lists it while the role is active.
        (
            [
                "GRANT `r` TO `a`@`localhost`",
                "GRANT RELOAD ON *.* TO `a`@`localhost`",
                "GRANT PROCESS, SUPER ON *.* TO `r`",
            ],
            [],
        ),
        # On one schema only: not enough.
        (["GRANT ALL PRIVILEGES ON `shop`.* TO `a`@`localhost`"], ["RELOAD", "BINLOG MONITOR", "PROCESS"]),
        (["GRANT RELOAD, REPLICATION CLIENT ON *.* TO `a`@`%`"], ["PROCESS"]),
    ],
)
def test_on_mariadb(grants, missing):
    assert lacking(grants, MARIADB) == missing


@pytest.mark.parametrize(
    ("grants", "missing"),
    [
        (
            ["GRANT USAGE ON *.* TO `a`@`localhost`"],
            ["BACKUP_ADMIN", "RELOAD", "REPLICATION CLIENT", "PROCESS", "SELECT"],
        ),
        (
            [
                "GRANT RELOAD, PROCESS, REPLICATION CLIENT ON *.* TO `a`@`localhost`",
                "GRANT BACKUP_ADMIN,CONNECTION_ADMIN ON *.* TO `a`@`localhost`",
                "GRANT SELECT ON `performance_schema`.* TO `a`@`localhost`",
            ],
            [],
        ),
        (
            [
                "GRANT SELECT, RELOAD, PROCESS, REPLICATION CLIENT ON *.* TO `a`@`%`",
                "GRANT BACKUP_ADMIN ON *.* TO `a`@`%`",
            ],
            [],
        ),
        (
            [
                "GRANT RELOAD, PROCESS, SUPER ON *.* TO `a`@`localhost`",
                "GRANT SELECT ON `performance_schema`.`threads` TO `a`@`localhost`",
            ],
            ["BACKUP_ADMIN", "SELECT"],
        ),
    ],
)
def test_on_mysql(grants, missing):
    assert lacking(grants, MYSQL) == missing


def test_what_only_some_jobs_need():
    grants = ["GRANT RELOAD, PROCESS, BINLOG MONITOR ON *.* TO `a`@`localhost`"]
    job = Job(source="mysql", stop_replica=True, kill_selects_after_s=60.0)
    assert lacking(grants, MARIADB, replica="somehow") == ["SLAVE MONITOR"]
    assert lacking(grants, MARIADB, job) == ["CONNECTION ADMIN"]
    assert lacking(grants, MARIADB, job, replica="by GTID") == [
        "SLAVE MONITOR",
        "REPLICATION SLAVE ADMIN",
        "CONNECTION ADMIN",
    ]
    assert "BACKUP_ADMIN" not in lacking([], abilities_of("mysql", instance_lock=False))


def test_what_the_server_does_not_state_exactly_is_read_from_its_tables():
    by_lock = Job(source="mysql", quiesce="backup-lock")
    grants = ["GRANT RELOAD, PROCESS, BINLOG MONITOR, SLAVE MONITOR ON *.* TO `a`@`localhost`"]
    assert lacking(grants, MARIADB, replica="by GTID") == []
    assert lacking(grants, MARIADB, by_lock, replica="by GTID") == ["SELECT"]
    sight = "GRANT SELECT ON `mysql`.`gtid_slave_pos` TO `a`@`localhost`"
    assert lacking([*grants, sight], MARIADB, by_lock, replica="by GTID") == []
    whole = lacking([], MYSQL, replica="by GTID")
    assert lacking([], MYSQL, replica="by file") == [*whole[:-1], "SELECT", "SELECT"]


def test_the_statements_name_any_account():
    lacked = [Privilege(name="RELOAD", why=""), Privilege(name="SELECT", why="", scope="performance_schema.*")]
    assert grant_statements("a`b@c@localhost", lacked) == (
        "GRANT RELOAD ON *.* TO `a``b@c`@`localhost`; GRANT SELECT ON performance_schema.* TO `a``b@c`@`localhost`;"
    )
