"""The campaign's count in the last lines of a test run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support import campaign

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not campaign.TALLIES:
        return
    terminalreporter.section("crash campaign")
    terminalreporter.write_line(campaign.HEADS)
    for tally in (*campaign.TALLIES, campaign.total(campaign.TALLIES)):
        terminalreporter.write_line(campaign.row(tally))
