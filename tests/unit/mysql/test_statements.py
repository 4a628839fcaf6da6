"""What stands before a statement does not hide it."""

from __future__ import annotations

import pytest

from snapmgr.mysql.connect.statements import is_only_a_select, kind, target


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
