"""The rooms below are written in the field's words: no private ones in code, help, messages and docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "snapmgr"
ROOMS = ("api", "catalog", "cli", "config", "contract", "schedule", "system", "testing", "trace", "tree")
OTHERS = re.compile(r"(bench|prepare)\w*\.py")
"""Commands that are not rewritten yet."""
WORDS = {
    "lacking": "missing",
    "LackingError": "MissingRequirementError",
    "clear(?:s|ing)? up": "clean up",
    "stands? still": "is stopped",
    "mends?": "repair",
    "(?:is|are) told of": "is reported",
    "cut short": "unfinished, interrupted",
    "fill_warn(?:_in)?": "capacity_warn",
    "[Vv]oice": "console",
}


@pytest.mark.parametrize("room", ROOMS)
def test_no_private_words(room):
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        if OTHERS.fullmatch(path.name):
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: write {better!r}"
                for word, better in WORDS.items()
                if (match := re.search(rf"\b{word}\b", line))
            ]
    assert found == []
