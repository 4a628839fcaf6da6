"""Which privileges an account lacks, from what SHOW GRANTS says."""

from __future__ import annotations

import pytest

from snapmgr.config import Job
from snapmgr.jobs.account import Privilege, grant_statements, missing_privileges, needed_privileges
from snapmgr.mysql.abilities import Abilities


def abilities(flavor, *, instance_lock=False):
    return Abilities(
        flavor=flavor,
        backup_stages=flavor == "mariadb",
        instance_lock=instance_lock,
        statement_time=flavor == "mariadb",
        binlog=True,
        binlog_status="",
        replica_status="",
        replica_word="REPLICA",
        cluster=None,
    )


MARIADB = abilities("mariadb")
MYSQL = abilities("mysql", instance_lock=True)
JOB = Job(source="mysql")


def lacking(grants, server, job=JOB, *, replica=False):
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
    assert lacking(grants, MARIADB, replica=True) == ["SLAVE MONITOR", "SELECT"]
    sight = [
        "GRANT SLAVE MONITOR ON *.* TO `a`@`localhost`",
        "GRANT SELECT ON `mysql`.`gtid_slave_pos` TO `a`@`localhost`",
    ]
    assert lacking([*grants, *sight], MARIADB, replica=True) == []
    assert lacking(grants, MARIADB, job) == ["CONNECTION ADMIN"]
    assert lacking(grants, MARIADB, job, replica=True) == [
        "SLAVE MONITOR",
        "REPLICATION SLAVE ADMIN",
        "CONNECTION ADMIN",
        "SELECT",
    ]
    assert "BACKUP_ADMIN" not in lacking([], abilities("mysql"))


def test_the_statements_name_any_account():
    lacked = [Privilege(name="RELOAD", why=""), Privilege(name="SELECT", why="", scope="performance_schema.*")]
    assert grant_statements("a`b@c@localhost", lacked) == (
        "GRANT RELOAD ON *.* TO `a``b@c`@`localhost`; GRANT SELECT ON performance_schema.* TO `a``b@c`@`localhost`;"
    )
