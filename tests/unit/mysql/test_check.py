"""The meaning of CHECK TABLE's lines, the sample of tables, and values that count as true."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError
from snapmgr.mysql.server.check import check_tables, is_true, judge, run_assertions, sample

NO_KEY = "its encryption key is not available"
ROCKS = "Unknown storage engine 'ROCKSDB'"
OPEN_TABLE = "1 client is using or hasn't closed the table properly"


@pytest.mark.parametrize(
    "lines",
    [
        [("status", "OK")],
        [("status", "Table is already up to date")],
        [("warning", OPEN_TABLE), ("status", "OK")],
        [("note", "something"), ("status", "OK")],
    ],
)
def test_whole_tables(lines):
    verdict = judge(lines)
    assert verdict.failure is None
    assert verdict.checked
    assert (verdict.note is None) == (len(lines) == 1)


@pytest.mark.parametrize(
    "lines",
    [
        [("Error", "Table 'shop.t' doesn't exist in engine"), ("status", "Operation failed")],
        [("Warning", "InnoDB: The B-tree of index t is corrupted."), ("error", "Corrupt")],
        [("error", "Record at pos: 0"), ("status", "OK")],
        [("warning", OPEN_TABLE), ("status", "Operation failed")],
        [("status", "Table is marked as crashed")],
        [("warning", "only a warning and no status")],
        [],
    ],
)
def test_damaged_tables(lines):
    verdict = judge(lines)
    assert verdict.failure
    for _, text in lines[:1]:
        assert text in verdict.failure


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        # As MariaDB 10.11 and MySQL 9.7 say it.
        ([("Error", "Unknown storage engine 'ROCKSDB'"), ("error", "Corrupt")], "its engine ROCKSDB is not loaded"),
        ([("Error", "Initialization of encryption failed for ./m/t.MAD"), ("error", "Corrupt")], NO_KEY),
        (
            [
                (
                    "Error",
                    "Can't find master key from keyring, please check in the server log if a keyring is loaded and "
                    "initialized successfully.",
                ),
                ("error", "Corrupt"),
            ],
            NO_KEY,
        ),
    ],
)
def test_what_cannot_be_opened_is_neither_whole_nor_damaged(lines, why):
    verdict = judge(lines)
    assert (verdict.failure, verdict.checked, verdict.unchecked) == (None, False, why)


NOT_SUPPORTED = [("note", "The storage engine for the table doesn't support check")]


@pytest.mark.parametrize(
    ("engine", "checksum", "result"),
    [
        # In memory or elsewhere: there is nothing to check.
        ("MEMORY", None, ((), ("`s`.`t`: not checked: MEMORY keeps no data here",), 0)),
        # What has no check is read.
        ("InnoDB", 5, ((), (), 1)),
        ("COLUMNSTORE", None, (("`s`.`t`: its engine COLUMNSTORE cannot check it",), (), 0)),
    ],
)
def test_a_table_without_a_check_is_read(engine, checksum, result):
    told = Told([("s", "t")], {"CHECK TABLE `s`.`t` QUICK": NOT_SUPPORTED}, engine=engine)
    told.answers["CHECKSUM TABLE `s`.`t` EXTENDED"] = [{"Table": "s.t", "Checksum": checksum}]
    report = check(told)
    assert report.failures == ()
    assert (report.unchecked, report.notes, report.tables_checked) == result


def test_a_table_whose_key_is_missing_is_told_from_a_damaged_one():
    # MariaDB says the same about both, and logs the same lines; its list of tablespaces tells them apart.
    said = [("Error", "Table `s`.`t` is corrupted. Please drop the table and recreate."), ("error", "Corrupt")]
    told = Told([("s", "t"), ("s", "u")], {"CHECK TABLE `s`.`t` QUICK": said, "CHECK TABLE `s`.`u` QUICK": said})
    told.keyless = [("s", "t")]
    logged = iter([(), ("[ERROR] InnoDB: File './s/t.ibd' is corrupted",), ()])
    report = check(told, complaints=lambda: next(logged))
    assert report.unchecked == (f"`s`.`t`: {NO_KEY}",)
    assert [failure.partition(":")[0] for failure in report.failures] == ["`s`.`u`"]


def test_tables_of_users_are_counted_by_themselves():
    told = Told([("mysql", "user"), ("shop", "t")], {"CHECK TABLE `shop`.`t` QUICK": [("Error", ROCKS)]})
    report = check(told)
    assert (report.tables_checked, report.user_tables_checked) == (1, 0)
    told.answers.clear()
    assert check(told).user_tables_checked == 1


TABLES = st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=50, unique=True)


@given(TABLES, st.floats(0.0001, 1), st.text())
def test_a_sample_is_a_part_in_order_and_the_same_for_the_same_seed(tables, share, seed):
    chosen = sample(tables, share, seed)
    assert chosen == sample(tables, share, seed)
    assert [table for table in tables if table in chosen] == chosen
    assert len(chosen) >= len(tables) * share
    assert len(chosen) <= len(tables) * share + 1
    assert sample(tables, 1, seed) == tables


def test_another_seed_gives_another_sample_so_that_all_tables_get_their_turn():
    tables = [("s", str(number)) for number in range(40)]
    seen = {table for number in range(60) for table in sample(tables, 0.1, f"id-{number}")}
    assert seen == set(tables)


@pytest.mark.parametrize("share", [0, -0.1, 1.01])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        sample([("a", "b")], share, "x")


@pytest.mark.parametrize(
    ("value", "true"),
    [
        (1, True),
        (-2, True),
        (0, False),
        (None, False),
        (Decimal("0.00"), False),
        (Decimal("0.1"), True),
        (0.0, False),
        ("1", True),
        ("0", False),
        ("0.0", False),
        ("yes", False),
        ("", False),
        (b"\x00", False),
        (b"\x01", True),
    ],
)
def test_truth_is_mysqls(value, true):
    assert is_true(value) is true


class Told:
    """A connection that answers by rote."""

    def __init__(self, tables, answers, engine="InnoDB"):
        self.tables, self.answers, self.engine, self.asked, self.timeouts = tables, answers, engine, [], []
        self.keyless = MysqlError("Unknown table 'INNODB_TABLESPACES_ENCRYPTION' in information_schema", errno=1109)

    def set_read_timeout(self, seconds):
        self.timeouts.append(seconds)

    def execute(self, sql):
        self.rows(sql)

    def rows(self, sql, _args=()):
        if "INNODB_TABLESPACES_ENCRYPTION" in sql:
            if isinstance(self.keyless, Exception):
                raise self.keyless
            return [{"s": schema, "t": table} for schema, table in self.keyless]
        if "information_schema" in sql:
            if isinstance(self.tables, Exception):
                raise self.tables
            return [{"s": schema, "t": table, "e": self.engine} for schema, table in self.tables]
        self.asked.append(sql)
        answer = self.answers.get(sql, [("status", "OK")])
        if isinstance(answer, Exception):
            raise answer
        return (
            [{"Msg_type": kind, "Msg_text": text} for kind, text in answer] if sql.startswith("CHECK TABLE") else answer
        )


def check(connection, **changes):
    options = {"depth": "quick", "share": 1.0, "seed": "x", "deadline": time.monotonic() + 60} | changes
    return check_tables(connection, **options)


def test_names_are_quoted_and_errors_of_one_table_do_not_stop_the_others():
    told = Told(
        [("a`b", "c.d"), ("s", "ä"), ("s", "z")],
        {"CHECK TABLE `s`.`ä` QUICK": MysqlError("no", errno=1), "CHECK TABLE `s`.`z` QUICK": [("error", "bad")]},
    )
    report = check(told)
    assert told.asked[0] == "CHECK TABLE `a``b`.`c.d` QUICK"
    assert report.failures == ("`s`.`ä`: no", "`s`.`z`: bad")
    assert (report.tables_checked, report.tables_total) == (3, 3)
    assert all(0 < seconds <= 60 for seconds in told.timeouts)


def test_a_server_that_dies_ends_the_check_with_a_failure():
    told = Told([("s", "a"), ("s", "b"), ("s", "c")], {"CHECK TABLE `s`.`b` EXTENDED": ConnectionLostError("gone")})
    report = check(told, depth="extended")
    assert told.asked == [
        "CHECK TABLE `s`.`a` EXTENDED",
        "CHECKSUM TABLE `s`.`a` EXTENDED",
        "CHECK TABLE `s`.`b` EXTENDED",
    ]
    assert report.tables_checked == 1
    assert len(report.failures) == 1
    assert "`s`.`b`: the server ended or hung" in report.failures[0]


def test_what_the_server_only_logs_is_a_failure_of_the_table_that_it_was_about():
    logged = iter([("[ERROR] InnoDB: old, from the recovery",), (), ("[ERROR] InnoDB: page 3 is corrupted",), ()])
    report = check(Told([("s", "a"), ("s", "b"), ("s", "c")], {}), complaints=lambda: next(logged))
    assert report.failures == ("`s`.`b`: the server's log says: [ERROR] InnoDB: page 3 is corrupted",)
    assert report.tables_checked == 3


def test_a_passed_deadline_is_a_failure_and_begins_nothing():
    told = Told([("s", "a")], {})
    report = check(told, deadline=time.monotonic() - 1)
    assert told.asked == []
    assert report.failures == ("the time limit was reached after 0 of 1 tables",)


def test_depth_none_counts_and_an_unreadable_list_is_a_failure():
    told = Told([("s", "a")], {})
    assert check(told, depth="none").tables_total == 1
    assert told.asked == []
    assert check(Told(ConnectionLostError("gone"), {}), depth="none").failures


def test_an_assertion_at_the_deadline_says_so():
    told = Told([], {"SELECT 1": ConnectionLostError("timed out")})
    failures, untried = run_assertions(told, ["SELECT 1", "SELECT 2"], deadline=time.monotonic() - 1)
    assert untried == ()
    assert failures == ("assertion 1: the time limit was reached; 1 more were not run",)


def test_assertions_are_numbered_not_quoted():
    one, two, three, four = "SELECT 'secret'", "SELECT 2", "SELECT 3", "SELECT 4"
    told = Told([], {one: MysqlError("syntax"), two: [{"x": 1}], three: ConnectionLostError("gone"), four: [{"x": 1}]})
    deadline = time.monotonic() + 60
    failures, _ = run_assertions(told, [one, two, three, four], deadline=deadline)
    assert failures == ("assertion 1: syntax", "assertion 3: gone; 1 more were not run")
    assert all(50 < seconds <= 60 for seconds in told.timeouts)
    told = Told([], {two: [{"x": 1, "y": 1}], four: []})
    assert run_assertions(told, [two, four], deadline=deadline)[0] == (
        "assertion 1: gave 1 rows of 2 columns, not one value",
        "assertion 2: gave 0 rows, not one value",
    )


def test_an_assertion_about_a_table_that_cannot_be_opened_is_not_false():
    closed = "Table `s`.`t` is corrupted. Please drop the table and recreate."
    told = Told([], {"1": MysqlError(ROCKS), "2": MysqlError(closed), "3": MysqlError("syntax"), "4": [{"x": 0}]})
    failures, untried = run_assertions(
        told, ["1", "2", "3", "4"], deadline=time.monotonic() + 60, unchecked=(f"`s`.`t`: {NO_KEY}",)
    )
    assert failures == ("assertion 3: syntax", "assertion 4: is not true")
    assert untried == (f"assertion 1: {ROCKS}", f"assertion 2: {closed}")
