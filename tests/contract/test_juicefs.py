"""The contract suite over clones in JuiceFS volumes, with their metadata in SQLite and in Redis."""

from __future__ import annotations

import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.testing import BackendContract, FolderLab
from snapmgr_juicefs import JuicefsBackend, JuicefsConfig
from support.juicefs import JuicefsVolume, juicefs_volume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.api import Pool, SnapshotRef

_FORMAT = ("--trash-days", "0", "--enable-acl")
_SHM = Path("/dev/shm")


class JuicefsLab(FolderLab):
    """Origins are folders in a volume."""

    kills = 3
    rounds = 1

    def __init__(self, volume: JuicefsVolume) -> None:
        super().__init__(JuicefsBackend, JuicefsConfig(warn_of_others=False), volume.point)
        self.volume_ = volume

    @property
    def store(self) -> Path:
        return self.volume_.point / ".snapmgr-juicefs"

    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        place = self.store / ref.name
        aside = self.folder / f"aside-{secrets.token_hex(4)}"
        place.rename(aside)
        self.volume_.juicefs("clone", "--preserve", str(aside), str(place))
        shutil.rmtree(aside)
        (place / "somebody's").write_bytes(b"precious")
        before = sorted(path.relative_to(place) for path in place.rglob("*"))
        return lambda: place.is_dir() and sorted(path.relative_to(place) for path in place.rglob("*")) == before

    @contextmanager
    def unreachable(self, pool: Pool) -> Iterator[None]:  # noqa: ARG002 - there is one
        hidden = self.store.with_name("hidden")
        self.store.rename(hidden)
        try:
            yield
        finally:
            hidden.rename(self.store)


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
