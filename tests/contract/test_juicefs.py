"""The contract suite over clones in JuiceFS volumes, with their metadata in SQLite and in Redis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.testing import BackendContract
from support.juicefs import JuicefsVolume, juicefs_volume
from support.juicefslab import JuicefsLab

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMAT = ("--trash-days", "0", "--enable-acl", "--capacity", "16")
_SHM = Path("/dev/shm")


@pytest.fixture(scope="class")
def on_sqlite() -> Iterator[JuicefsVolume]:
    with juicefs_volume("sqlite", format_options=_FORMAT, mount_options=("--enable-xattr",), base=_SHM) as made:
        yield made


@pytest.fixture(scope="class")
def on_redis() -> Iterator[JuicefsVolume]:
    options = ("--enable-xattr", "--writeback")
    with juicefs_volume("redis", format_options=_FORMAT, mount_options=options, base=_SHM) as made:
        yield made


class _Clones(BackendContract):
    # This backend promises whole files and no more.
    test_one_instant_if_promised = None
    # The volume tells neither what a clone shares nor where a file has holes.
    test_usage = None
    test_holes_stay_holes = None


@pytest.mark.needs("root", "juicefs")
class TestJuicefsOnSqlite(_Clones):
    @pytest.fixture
    def lab(self, on_sqlite: JuicefsVolume) -> JuicefsLab:
        return JuicefsLab(on_sqlite)


@pytest.mark.needs("root", "juicefs", "redis")
class TestJuicefsOnRedis(_Clones):
    @pytest.fixture
    def lab(self, on_redis: JuicefsVolume) -> JuicefsLab:
        return JuicefsLab(on_redis)
