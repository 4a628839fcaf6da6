"""The storages that ``doctor --fix`` is tried on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.watched import watched_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.watched import Storage


@pytest.fixture(params=["btrfs", "xfs"])
def storage(request: pytest.FixtureRequest) -> Iterator[Storage]:
    with watched_storage(request.param) as made:
        yield made


@pytest.fixture
def btrfs() -> Iterator[Storage]:
    with watched_storage("btrfs") as made:
        yield made
