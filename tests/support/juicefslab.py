"""The contract suite's way to use the JuiceFS backend; other tests of it use the same."""

from __future__ import annotations

import secrets
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.testing import FolderLab
from snapmgr_juicefs import JuicefsBackend, JuicefsConfig
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapmgr.api import Pool, SnapshotRef
    from support.juicefs import JuicefsVolume


class JuicefsLab(FolderLab):
    """Origins are folders in a volume."""

    kills = 7 if CAMPAIGN else 1
    rounds = 3 if CAMPAIGN else 1
    files = 300 if CAMPAIGN else 60
    looks = 20 if CAMPAIGN else 4

    def __init__(self, volume: JuicefsVolume, config: JuicefsConfig | None = None) -> None:
        """Take the volume, which is mounted, and another configuration than the plain one."""
        super().__init__(JuicefsBackend, config or JuicefsConfig(ask_metadata=False), volume.point)
        self.volume_ = volume

    @property
    def store(self) -> Path:
        """The folder of the clones."""
        return self.volume_.point / ".snapmgr-juicefs"

    def impostor(self, ref: SnapshotRef) -> Callable[[], bool]:
        """Put a clone of the snapshot's copy folder in its place."""
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
        """Rename the store."""
        hidden = self.store.with_name("hidden")
        self.store.rename(hidden)
        try:
            yield
        finally:
            hidden.rename(self.store)
