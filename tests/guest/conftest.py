"""A volume group on the scratch disk for each file of tests; see support.lvm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import lvm

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def disk() -> Iterator[str]:
    """The scratch disk, blank before and afterwards."""
    disk = lvm.scratch_disk()
    lvm.wipe(disk)
    yield disk
    lvm.wipe(disk)


@pytest.fixture(scope="module")
def shared_vg(disk: str) -> Iterator[lvm.VolumeGroup]:
    """One volume group for a file's tests, on the whole disk; what they make in it stays until its end."""
    with lvm.volume_group([disk]) as group:
        yield group


@pytest.fixture
def vg(shared_vg: lvm.VolumeGroup) -> Iterator[lvm.VolumeGroup]:
    """The volume group, empty after each test."""
    yield shared_vg
    shared_vg.clear()
