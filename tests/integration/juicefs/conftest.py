"""JuiceFS volumes for the tests of the backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.juicefs import JuicefsVolume, juicefs_volume
from support.juicefslab import JuicefsLab

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def volume() -> Iterator[JuicefsVolume]:
    with juicefs_volume("sqlite", base=Path("/dev/shm")) as made:
        yield made


@pytest.fixture
def lab(volume: JuicefsVolume) -> JuicefsLab:
    return JuicefsLab(volume)
