"""The fingerprint of a tree: any change shows, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.fire import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(name="tree")
def _tree(tmp_path: Path) -> Path:
    for name in ("a/inner", "b"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a/inner/one", "a/two", "b/three", "four"):
        (tmp_path / name).write_text(name)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")).touch()
    return tmp_path


def test_an_unchanged_tree_has_the_same_one(tree: Path) -> None:
    before = fingerprint(str(tree))
    (tree / "a/two").read_text()
    assert fingerprint(str(tree)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "a/inner/one").write_text("ONE"),
        lambda tree: (tree / "four").chmod(0o600),
        lambda tree: os.utime(tree / "b/three", ns=(5, 5)),
        lambda tree: (tree / "a/inner/one").unlink(),
        lambda tree: (tree / "b/new").touch(),
        lambda tree: (tree / "a/two").rename(tree / "a/2"),
        lambda tree: (tree / "a/inner").rename(tree / "b/inner"),
    ],
)
def test_a_change_shows(tree: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint(str(tree))
    change(tree)
    assert fingerprint(str(tree)) != before
