"""The published question about ext4: the page says what the committed samples show."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.published import unpacked
from bench.threads import REPETITIONS, report

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "explanation" / "file-systems-and-threads.md"


@pytest.fixture(scope="module")
def samples():
    return unpacked(ROOT / "tests" / "golden" / "bench" / "threads.tar.xz")


def test_the_page_has_the_tables_that_the_samples_make(samples):
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in report(samples) if line not in page] == []


def test_the_samples_are_whole_and_of_a_machine_that_the_page_names(samples):
    assert {(one["scenario"], one["variant"], one["failure"]) for one in samples} == {("oltp-threads", "o_direct", "")}
    assert {one.variant for one in REPETITIONS} == {"o_direct", "o_dsync"}
    (machine,) = {
        (one["host"]["kernel"].startswith("6.18."), one["host"]["device"]["kind"], bool(one["host"].get("host")))
        for one in samples
    }
    assert machine == (True, "loop", False)
    # The claims below the table.
    better = [line for line in report(samples) if line.endswith(("better |", "worse |"))]
    assert [line.split(" | ")[:2] for line in better] == [
        ["| Transactions a second, at the best number of clients", f"{one} ÷ btrfs"]
        for one in ("ext4, dioread_nolock", "XFS, no snapshots")
    ]
