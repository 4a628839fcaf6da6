"""Code, help, messages and docstrings use the field's words, and no private ones: see docs/glossary.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in [*ROOT.glob("snapmgr/*/__init__.py"), *ROOT.glob("backends/*/__init__.py")])
WORDS = {
    "lacking": "missing",
    "LackingError": "MissingRequirementError",
    "clear(?:s|ing)? up": "clean up",
    "stands? still": "is stopped",
    "mends?": "repair",
    "(?:is|are) told of": "is reported",
    "fill_warn(?:_in)?": "capacity_warn",
    "cut short": "unfinished, interrupted, truncated",
    "[Vv]oice": "console",
}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_private_words(folder):
    found = []
    for path in sorted(folder.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: write {better!r}"
                for word, better in WORDS.items()
                if (match := re.search(rf"\b{word}\b", line))
            ]
    assert found == []
