"""The choice of the lock, and its reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.lock.levels import LockNeeds, choose
from support.sample import abilities_of

MARIADB, MYSQL = abilities_of("mariadb"), abilities_of("mysql")
# MariaDB 10.3, MySQL 5.7.
OLD_MARIADB = replace(MARIADB, backup_stages=False)
OLD_MYSQL = replace(MYSQL, instance_lock=False)
DURABLE = {"sync_binlog": "1", "innodb_flush_log_at_trx_commit": "1"}
INNODB = LockNeeds(engines={"InnoDB": 5}, settings=DURABLE)
MIXED = LockNeeds(engines={"InnoDB": 5, "MyISAM": 1, "CSV": 2}, settings=DURABLE)
ARIA = LockNeeds(engines={"InnoDB": 5, "Aria": 2}, settings=DURABLE)


@pytest.mark.parametrize(
    ("abilities", "level", "begin", "last"),
    [
        (MARIADB, "backup-lock", "BACKUP STAGE START", "BACKUP STAGE BLOCK_COMMIT"),
        (MYSQL, "backup-lock", "LOCK INSTANCE FOR BACKUP", "FLUSH TABLES WITH READ LOCK"),
        (OLD_MARIADB, "global-read-lock", None, "FLUSH TABLES WITH READ LOCK"),
        (OLD_MYSQL, "global-read-lock", None, "FLUSH TABLES WITH READ LOCK"),
    ],
)
@pytest.mark.parametrize("needs", [INNODB, MIXED, LockNeeds()])
def test_an_exact_position_needs_a_lock_that_stops_commits(abilities, level, begin, last, needs):
    choice = choose("auto", abilities, needs)
    assert (choice.level, choice.position, choice.lock[-1]) == (level, True, last)
    assert choice.begin == ((begin,) if begin else ())
    assert choice.flush == ()
    assert choice.why


@pytest.mark.parametrize("asked", ["auto", "freeze-process"])
def test_what_is_logged_before_it_is_committed_needs_the_global_read_lock(asked):
    choice = choose(asked, MARIADB, ARIA)
    assert (choice.level, choice.position, choice.freeze) == ("global-read-lock", True, asked == "freeze-process")
    assert "Aria" in choice.why
    # Without a position the stages are enough.
    assert choose(asked, MARIADB, replace(ARIA, position=False)).level == "backup-lock"


def test_under_the_stages_such_a_server_has_no_exact_position():
    with pytest.raises(NotQuiescedError, match="rows of Aria") as failure:
        choose("backup-lock", MARIADB, ARIA)
    assert 'position = "best"' in (failure.value.hint or "")
    assert not choose("backup-lock", MARIADB, replace(ARIA, position=False, logs_apart=("/logs",))).position


@pytest.mark.parametrize("abilities", [MARIADB, MYSQL])
def test_where_no_lock_is_needed_auto_can_do_without_and_says_why(abilities):
    choice = choose("auto", abilities, INNODB)
    assert choice.instead is not None
    assert (choice.instead.level, choice.instead.tail) == ("crash-consistent", True)
    assert "not free at once; all tables are InnoDB" in choice.instead.why
    for needs in (MIXED, replace(INNODB, atomic=False), replace(INNODB, replica=True), replace(INNODB, engines=None)):
        assert choose("auto", abilities, needs).instead is None
    for asked in ("backup-lock", "global-read-lock", "crash-consistent", "freeze-process"):
        assert choose(asked, abilities, INNODB).instead is None
    # Without a position it begins at the other end.
    instead = choose("auto", abilities, replace(INNODB, position=False)).instead
    assert instead is not None
    assert instead.lock


def test_hints_name_what_would_make_the_lock_unnecessary():
    assert "crash-consistent" in choose("backup-lock", MYSQL, INNODB).ways[0]
    (convert, best) = choose("auto", MARIADB, ARIA).ways
    assert "convert the tables that are not InnoDB (2 of Aria)" in convert
    assert 'position = "best"' in best
    (change,) = choose("auto", MYSQL, replace(INNODB, settings=DURABLE | {"sync_binlog": "0"})).ways
    assert "sync_binlog is 0" in change


@pytest.mark.parametrize("asked", ["auto", "backup-lock", "global-read-lock", "freeze-process", "crash-consistent"])
def test_an_exact_position_without_a_binary_log_is_refused_early(asked):
    for abilities in (MARIADB, MYSQL):
        with pytest.raises(NotQuiescedError, match="no binary log") as failure:
            choose(asked, replace(abilities, binlog=False), INNODB)
        assert 'position = "best"' in (failure.value.hint or "")
        assert choose(asked, replace(abilities, binlog=False), replace(INNODB, position=False))
    # The position of a replica without one is where it has executed its source.
    if asked != "crash-consistent":
        assert choose(asked, replace(MARIADB, binlog=False), replace(INNODB, replica=True))


def test_an_applier_that_writes_ahead_of_the_position_is_refused_early():
    ahead = replace(MIXED, replica=True, applies=True)
    with pytest.raises(NotQuiescedError, match="ahead of the binary log") as failure:
        choose("auto", MARIADB, ahead)
    assert "stop_replica = true" in (failure.value.hint or "")
    assert choose("auto", MARIADB, replace(ahead, applies=False))
    assert choose("auto", MARIADB, replace(ahead, parallel_applier=True))
    assert choose("auto", MARIADB, replace(ahead, engines={"InnoDB": 5}))
    assert choose("auto", MYSQL, ahead)


@pytest.mark.parametrize("asked", ["auto", "freeze-process"])
def test_parallel_appliers_need_the_global_read_lock(asked):
    assert choose(asked, MARIADB, replace(INNODB, parallel_applier=True)).level == "global-read-lock"
    assert choose(asked, MYSQL, replace(INNODB, parallel_applier=True)).level == "backup-lock"


@pytest.mark.parametrize("abilities", [MARIADB, MYSQL])
def test_logs_of_another_instant_make_a_flush_of_the_engines_logs(abilities):
    choice = choose("auto", abilities, replace(MIXED, logs_apart=("/logs",)))
    assert choice.flush == ("FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS",)
    assert "/logs" in choice.why
    assert choose("global-read-lock", abilities, replace(MIXED, logs_apart=("/logs",))).flush == choice.flush


@pytest.mark.parametrize("abilities", [MARIADB, MYSQL])
def test_without_a_position_and_all_innodb_no_lock_is_the_least(abilities):
    choice = choose("auto", abilities, replace(INNODB, position=False))
    assert (choice.level, choice.lock, choice.tail) == ("crash-consistent", (), False)


def test_without_a_position_mariadb_need_not_stop_commits_for_other_engines():
    choice = choose("auto", MARIADB, replace(MIXED, position=False))
    assert (choice.lock[-1], choice.position) == ("BACKUP STAGE BLOCK_DDL", False)
    assert "CSV, MyISAM" in choice.why
    # The data must hold all that was committed: then nothing may be committed after the flush.
    choice = choose("auto", MARIADB, replace(MIXED, position=False, logs_apart=("/logs",)))
    assert choice.lock[-1] == "BACKUP STAGE BLOCK_COMMIT"


@pytest.mark.parametrize("abilities", [MARIADB, MYSQL])
def test_crash_consistent_reads_the_position_from_the_binlog(abilities):
    choice = choose("crash-consistent", abilities, INNODB)
    assert (choice.level, choice.position, choice.tail) == ("crash-consistent", False, True)
    assert not choose("crash-consistent", abilities, replace(INNODB, position=False)).tail


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"engines": {"InnoDB": 1, "MyISAM": 3}}, "tables of MyISAM"),
        ({"engines": None}, "unknown"),
        ({"settings": None}, "unknown"),
        ({"atomic": False}, "one instant"),
        ({"logs_apart": ("/logs",)}, "/logs"),
        ({"settings": DURABLE | {"sync_binlog": "0"}}, "sync_binlog is 0"),
        ({"settings": {"sync_binlog": "1"}}, "innodb_flush_log_at_trx_commit is ?"),
        ({"settings": DURABLE | {"encrypt_binlog": "ON"}}, "encrypt_binlog"),
    ],
)
def test_crash_consistent_is_refused_with_the_reason(change, reason):
    for abilities in (MARIADB, MYSQL):
        with pytest.raises(NotQuiescedError) as failure:
            choose("crash-consistent", abilities, replace(INNODB, **change))
        assert reason in failure.value.message


def test_tables_without_data_are_no_obstacle():
    assert choose("crash-consistent", MARIADB, replace(INNODB, engines={"InnoDB": 1, "MEMORY": 2, "BLACKHOLE": 1}))


def test_durability_matters_for_the_position_only():
    lazy = {"sync_binlog": "0", "innodb_flush_log_at_trx_commit": "2"}
    assert choose("crash-consistent", MARIADB, replace(INNODB, settings=lazy, position=False)).lock == ()
    without = replace(MARIADB, binlog=False)
    assert choose("crash-consistent", without, replace(INNODB, settings=lazy, position=False)).lock == ()


@pytest.mark.parametrize("abilities", [MARIADB, MYSQL, OLD_MARIADB])
def test_freezing_takes_the_best_lock_as_well(abilities):
    choice = choose("freeze-process", abilities, replace(MIXED, position=False))
    assert (choice.freeze, choice.name) == (True, "freeze-process")
    assert choice.lock[-1] in ("BACKUP STAGE BLOCK_COMMIT", "FLUSH TABLES WITH READ LOCK")


def test_what_a_server_cannot_do_is_refused():
    with pytest.raises(NotQuiescedError, match="knows neither"):
        choose("backup-lock", OLD_MYSQL, INNODB)
    with pytest.raises(NotQuiescedError, match="LOCK INSTANCE"):
        choose("crash-consistent", OLD_MYSQL, INNODB)


@pytest.mark.parametrize("cluster", ["Galera", "Group Replication"])
@pytest.mark.parametrize("asked", ["auto", "backup-lock", "global-read-lock", "freeze-process", "crash-consistent"])
def test_members_of_a_cluster_are_refused(asked, cluster):
    with pytest.raises(NotQuiescedError, match=cluster):
        choose(asked, replace(MARIADB, cluster=cluster), INNODB)


@pytest.mark.parametrize("level", ["auto", "backup-lock", "global-read-lock", "freeze-process"])
def test_a_redo_log_written_once_a_second_is_flushed_under_every_lock(level: str) -> None:
    for abilities in (MARIADB, MYSQL):
        choice = choose(level, abilities, replace(MIXED, settings={"innodb_flush_log_at_trx_commit": "0"}))
        assert choice.redo_lags
        assert choice.flush == ("FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS",)
        durable = choose(level, abilities, replace(MIXED, settings={"innodb_flush_log_at_trx_commit": "2"}))
        assert not durable.redo_lags
        assert durable.flush == ()
