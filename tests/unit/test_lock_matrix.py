"""The matrix of locks without any server: its selection by pairs, its file of results, its tables."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.matrix.cells import (
    SERVERS,
    all_cells,
    cover_pairs,
    default_snapshots,
    fewest_cells,
    pairs_of,
    selected_cells,
    taken_cells,
)
from support.matrix.report import write_report
from support.matrix.results import Result, append, read
from support.matrix.series import missing_tasks

if TYPE_CHECKING:
    from pathlib import Path

_TIMES = {"wait": 0.003, "hold": 0.004, "call": 0.002, "bare": 0.0015, "stall": 0.02}


def _snapshot(cell: str, **fields: object) -> Result:
    values: dict[str, object] = {
        "cell": cell,
        "kind": "snapshot",
        "level": "backup-lock",
        "position": "exact",
        "times": _TIMES,
        "version": "10.11.6-MariaDB",
        "at": "2026-01-31T02:30:00+00:00",
    }
    return Result(**(values | fields))  # type: ignore[arg-type]


def _cell(*, refused: bool = False) -> str:
    return next(cell.id for cell in all_cells() if (cell.refusal is not None) == refused)


def test_every_two_values_that_can_meet_are_in_a_selected_cell() -> None:
    taken, selected = taken_cells(), selected_cells()
    values = [cell.values for cell in taken]
    for first, second in combinations(range(4), 2):
        meeting = {(row[first], row[second]) for row in values}
        assert {(cell.values[first], cell.values[second]) for cell in selected} == meeting
    assert set(selected) <= set(taken)
    assert len(selected) < len(taken) / 4
    assert {cell.server for cell in selected} == set(SERVERS)


def test_the_fewest_cells_have_all_values_each_level_on_both_flavors_and_each_engine_on_each_server() -> None:
    taken, fewest = taken_cells(), fewest_cells()
    assert set(fewest) <= set(taken)
    assert len(fewest) < len(selected_cells()) * 2 / 3
    assert {cell.layout for cell in fewest} == {cell.layout for cell in taken}
    assert {(cell.server, cell.engines) for cell in fewest} == {(cell.server, cell.engines) for cell in taken}
    for servers in ({"mysql-9"}, set(SERVERS) - {"mysql-9"}):
        levels = {cell.level for cell in taken if cell.server in servers}
        assert {cell.level for cell in fewest if cell.server in servers} == levels


@given(st.lists(st.tuples(*[st.sampled_from("abc")] * 4), unique=True))
def test_pairs_of_any_rows_are_covered_and_no_row_is_idle(rows: list[tuple[str, ...]]) -> None:
    chosen = cover_pairs(rows)
    assert len(chosen) == len(set(chosen))
    wanted = {pair for row in rows for pair in pairs_of(row)}
    assert {pair for number in chosen for pair in pairs_of(rows[number])} == wanted


def test_mysql_has_no_aria_and_the_whole_is_500_snapshots() -> None:
    cells = all_cells()
    assert len({cell.id for cell in cells}) == len(cells)
    assert not [cell for cell in cells if cell.server == "mysql-9" and "aria" in cell.engines]
    assert default_snapshots(cells) * len(taken_cells()) >= 500
    without = [cell for cell in cells if cell.server != "mysql-9"]
    taken = [cell for cell in taken_cells() if cell.server != "mysql-9"]
    assert default_snapshots(without) * len(taken) >= 500


def test_a_second_start_does_what_is_missing() -> None:
    cells = [cell for cell in all_cells() if cell.id in (_cell(), _cell(refused=True))]
    tasks = {task.cell.id: task for task in missing_tasks(cells, [], 5)}
    assert (tasks[_cell()].snapshots, tasks[_cell()].replay) == (5, True)
    assert tasks[_cell(refused=True)].snapshots == 1
    results = [
        _snapshot(_cell(), replay=""),
        _snapshot(_cell()),
        Result(cell=_cell(), kind="failed", text="no room"),
        Result(cell=_cell(refused=True), kind="refused", text="for a reason"),
    ]
    (task,) = missing_tasks(cells, results, 5)
    assert (task.cell.id, task.snapshots, task.replay) == (_cell(), 3, False)
    assert missing_tasks(cells, results * 3, 5) == []


def test_a_line_cut_short_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "results"
    assert read(path) == []
    append(path, _snapshot(_cell()))
    with path.open("ab") as file:
        file.write(b'{"cell": "mariad')
    append(path, _snapshot(_cell(), position="the GTID differs"))
    assert [one.position for one in read(path)] == ["exact", "the GTID differs"]


def test_results_of_another_schema_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results"
    append(path, _snapshot(_cell(), schema=99))
    with pytest.raises(ValueError, match="schema 99"):
        read(path)


def test_the_tables_show_what_is_wrong_in_every_place() -> None:
    results = [
        _snapshot(_cell(), replay=""),
        _snapshot(_cell(), position="the GTID differs", invariant="a hole", lost="writer 3", replay="t differs"),
        Result(cell=_cell(), kind="failed", text="no room"),
        Result(cell=_cell(refused=True), kind="refused", text="it copies file by file"),
    ]
    report = write_report(results)
    for expected in (
        "| **1/2** | **1/2** | **1/2** | 3.0 / 3.0 / 3.0 | 4.0 / 4.0 / 4.0 | 1.5 / 1.5 / 1.5 | 20.0 / 20.0 / 20.0 |",
        "| refused: it copies file by file |",
        "- WRONG " + _cell(),
        "a hole; writer 3; the GTID differs; t differs",
        "- FAILED " + _cell() + ": no room",
        "2 snapshots on 10.11.6-MariaDB: 1 wrong positions, 1 broken invariants, 1 with",
        "1 of 2 replays equal; 1 cells refused",
        "+2.50, **beyond** 2 ms",
    ):
        assert expected in report
    assert "**" not in write_report([_snapshot(_cell(), replay="", times=_TIMES | {"hold": 0.003})])
