"""What the reflink backend decides, without any storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.api import MissingRequirementError, Pool, StorageError, Volume
from snapmgr_reflink.copying import check_rights, check_room, forecast_s
from snapmgr_reflink.survey import Survey, survey


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 10**6), st.integers(0, 2**40))
def test_forecast_grows_with_everything(files: int, folders: int, extents: int, allocated: int) -> None:
    less = Survey(files=files, folders=folders, extents=extents, allocated_bytes=allocated)
    more = Survey(files=files + 1, folders=folders, extents=extents + 10, allocated_bytes=allocated + 4096)
    for method in ("reflink", "copy"):
        assert 0 < forecast_s(less, method) < forecast_s(more, method)
    assert forecast_s(less, "reflink") <= forecast_s(less, "copy")


def test_forecast_meets_the_measurement() -> None:
    # 300 files: 11 ms in one extent each, 950 ms in 223 extents each (XFS).
    assert 0.011 <= forecast_s(Survey(files=300, folders=1, extents=300), "reflink") <= 0.04
    assert 0.9 <= forecast_s(Survey(files=300, folders=1, extents=300 * 223), "reflink") <= 1.3


def test_obstacles_are_named() -> None:
    volume = Volume(backend="reflink", id="x", pool=Pool(backend="reflink", id="/s", hint=""), path="/d", subpath="")
    seen = Survey()
    check_rights(volume, seen)
    for number in range(100):
        seen.hinder(f"file-{number}", "cannot be read by this user")
    with pytest.raises(MissingRequirementError, match="file-0 cannot be read") as caught:
        check_rights(volume, seen)
    assert len(str(caught.value)) < 1000


def test_room_is_checked_by_method(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        huge = Survey(files=1, folders=1, extents=1, allocated_bytes=1 << 60)
        check_room(fd, str(tmp_path), huge, "reflink")
        with pytest.raises(StorageError, match="free"):
            check_room(fd, str(tmp_path), huge, "copy")
    finally:
        os.close(fd)


def test_survey_counts(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a", "folder/b", "folder/empty"):
        (tmp_path / name).write_bytes(b"" if name.endswith("empty") else b"x" * 10_000)
    (tmp_path / "link").symlink_to("a")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        seen = survey(fd, extents=True)
    finally:
        os.close(fd)
    assert (seen.files, seen.folders, seen.excluded, seen.obstacles) == (4, 2, [], [])
    assert seen.allocated_bytes == sum((tmp_path / name).stat().st_blocks * 512 for name in ("a", "folder/b"))
