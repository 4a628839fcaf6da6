"""What a statement's text shows: its first words, its kind, its table; leading comments do not hide it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.mysql.connect.statements import code, is_only_a_select, kind, reads_tables, target


@pytest.mark.parametrize("verb", ["ALTER TABLE d.t FORCE", "UPDATE d.t SET a = 1"])
@pytest.mark.parametrize(
    "form",
    [
        "SET STATEMENT max_statement_time = 0 FOR {}",
        "set statement sort_buffer_size = 1000, sql_mode = 'FOR x'\nfor {}",
        "/*!100000 {} */",
        "/*M! {} */",
        "/* a */ /*!40101 {}",
    ],
)
def test_a_prefix_hides_nothing(form: str, verb: str) -> None:
    sql = form.format(verb)
    assert kind(sql) == ("ddl" if verb.startswith("ALTER") else "write")
    assert target(sql) == ("d", "t")
    assert not is_only_a_select(sql)


def test_set_by_itself_is_no_statement_of_that_kind() -> None:
    assert kind("SET @x = (SELECT 1 FROM t FOR UPDATE)") == "other"
    assert kind("/* ALTER TABLE t */ SET autocommit = 1") == "other"


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 1", "read"),
        ("  (select 1) union (select 2)", "read"),
        ("/* app */ SELECT 'FOR UPDATE' FROM t", "read"),
        ("SELECT * FROM t -- FOR UPDATE\n WHERE a = 1", "read"),
        ("SELECT * FROM t FOR UPDATE", "write"),
        ("WITH x AS (SELECT 1) SELECT * FROM x", "read"),
        ("WITH x AS (SELECT 1) DELETE FROM t USING t JOIN x", "write"),
        ("TABLE t", "read"),
        ("insert into t values (1)", "write"),
        ("LOAD DATA INFILE 'x' INTO TABLE t", "write"),
        ("ALTER TABLE t ADD c INT", "ddl"),
        ("CREATE TABLE t AS SELECT 1", "ddl"),
        ("CREATE TEMPORARY TABLE t AS SELECT 1", "other"),
        ("CREATE OR REPLACE TEMPORARY TABLE t (a INT)", "other"),
        ("DROP TEMPORARY TABLE t", "other"),
        ("CALL p()", "other"),
        ("LOCK TABLES t WRITE", "other"),
        ("", "other"),
        ("'unfinished", "other"),
    ],
)
def test_kind(sql, expected):
    assert kind(sql) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("UPDATE d.t SET a = 1", ("d", "t")),
        ("update low_priority ignore `my db`.`t``x` set a = 1", ("my db", "t`x")),
        ("INSERT INTO t (a) SELECT 1", (None, "t")),
        ("REPLACE d . t VALUES (1)", ("d", "t")),
        ("INSERT HIGH_PRIORITY IGNORE INTO d.t VALUES (1)", ("d", "t")),
        ("DELETE FROM t WHERE a IN (SELECT b FROM u)", (None, "t")),
        ("DELETE QUICK FROM d.t", ("d", "t")),
        ("LOAD DATA LOCAL INFILE 'INTO TABLE x' REPLACE INTO TABLE d.t", ("d", "t")),
        ("ALTER ONLINE TABLE IF EXISTS d.t FORCE", ("d", "t")),
        ("CREATE UNIQUE INDEX x ON d.t (a)", ("d", "t")),
        ("OPTIMIZE NO_WRITE_TO_BINLOG TABLE t", (None, "t")),
        ("REPAIR TABLE d.t QUICK", ("d", "t")),
        ("CREATE TABLE t AS SELECT 1", None),
        ("SELECT 1", None),
    ],
)
def test_target(sql, expected):
    assert target(sql) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM t", True),
        ("/* report */ WITH x AS (SELECT 1) SELECT * FROM x, t", True),
        ("SELECT 'INTO' FROM t", True),
        ("SELECT a INTO OUTFILE '/x' FROM t", False),
        ("SELECT a FROM t INTO @x", False),
        ("SELECT a FROM t FOR UPDATE", False),
        ("SELECT a FROM t FOR SHARE", False),
        ("SELECT a FROM t LOCK IN  SHARE MODE", False),
        ("SELECT /*!40001 SQL_NO_CACHE */ * FROM t", False),
        ("SELECT SQL_NO_CACHE * FROM t", False),
        ("SELECT a FROM t /*!50000 FOR UPDATE */", False),
        ("SELECT a FROM t /*M! FOR UPDATE */", False),
        ("UPDATE t SET a = 1", False),
        ("CALL p()", False),
        ("", False),
    ],
)
def test_only_a_plain_select_may_be_ended(sql, expected):
    assert is_only_a_select(sql) is expected


def test_a_select_without_a_table_holds_none():
    assert not reads_tables("SELECT SLEEP(9), 'FROM t'")
    assert reads_tables("SELECT a FROM t")
    assert reads_tables("TABLE t")


@given(st.text(max_size=60), st.text(max_size=60).map(lambda text: text.replace("'", "").replace("\\", "")))
def test_no_literal_survives_and_no_text_breaks_it(anything, literal):
    kind(anything)
    target(anything)
    is_only_a_select(anything)
    assert code(f"SELECT '{literal}' x") == "SELECT '' x"
