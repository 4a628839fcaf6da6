"""A scene for snapmgr on logical volumes: a server on one or more of them, and a job "demo"."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from support.exactness import take
from support.scene import Scene
from support.server import private_server, server_user
from support.storage import LoopFileSystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from snapmgr.catalog.manifest import Manifest
    from support.exactness import Taken
    from support.lvm import Origin, VolumeGroup

Kind = Literal["classic", "thin"]
# In a guest starting a program takes 20 ms and an lvcreate up to a second.
_JOB = 'max_stall = "30s"\nlock_hold = "30s"'


class LvmScene(Scene):
    """A server whose datadir lies on a logical volume."""

    def __init__(self, group: VolumeGroup, origin: Origin, folder: Path) -> None:
        super().__init__(
            LoopFileSystem(point=origin.point, device=origin.device, image=folder, fs_type=origin.fs_type), folder, None
        )
        self.group = group
        self.origin = origin
        self.redo: Path | None = None
        """Where the redo log is, if it is elsewhere."""

    def configure(self, job: str = "", *, text: str = "", name: str = "demo") -> None:
        """Write the configuration: one job for the server, with further lines `job`; or the whole of `text`."""
        body = (
            text or f'[job.{name}]\nsource = "mysql"\nsocket = "{self.server.socket}"\nuser = "root"\n{_JOB}\n{job}\n'
        )
        super().configure(text=f'[backend.lvm]\ncow_size = "60%"\nscratch_dir = "{self.folder}/cow"\n{body}')

    def stored(self) -> list[str]:
        """Return the names of all logical volumes of snapmgr's."""
        return [name for name in self.group.names() if name.startswith("snapmgr.")]


def make_origin(group: VolumeGroup, kind: Kind, fs_type: str, name: str, *, size_mib: int = 512) -> Origin:
    """Make a logical volume with a file system, in a thin pool if it is to be thin, and mount it."""
    if kind == "classic":
        return group.classic_origin(name, size_mib=size_mib, fs_type=fs_type)
    if "pool" not in group.names():
        group.pool(data_mib=3 << 10, metadata_mib=32)
    return group.thin_origin(name, size_mib=size_mib, fs_type=fs_type)


@contextmanager
def lvm_scene(
    group: VolumeGroup,
    kind: Kind,
    fs_type: str,
    *,
    size_mib: int = 512,
    redo: tuple[Kind, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[LvmScene]:
    """Yield a scene with a running server (with further `options`), configured with the job "demo".

    With `redo` its redo log and undo tablespaces lie on another volume of that kind and file system.
    """
    with work_folder() as folder:
        scene = LvmScene(group, make_origin(group, kind, fs_type, "data", size_mib=size_mib), folder)
        moved: list[str] = []
        if redo is not None:
            place = make_origin(group, *redo, "redo").point / "redo"
            place.mkdir()
            os.chown(place, server_user().pw_uid, server_user().pw_gid)
            scene.redo = place
            moved = [f"--innodb-log-group-home-dir={place}", f"--innodb-undo-directory={place}"]
        install = [*moved, "--innodb-undo-tablespaces=2"] if moved else []
        with private_server(scene.origin.point / "data", [*moved, *options], install_options=install) as server:
            scene._server = server
            scene.configure()
            yield scene


def take_by_command(scene: LvmScene, count: int) -> list[Taken]:
    """Take snapshots of the loaded server by the command line; no two are of the same instant."""

    def backup() -> Manifest:
        done = scene.run("backup", "demo")
        assert done.returncode == 0, done.stderr
        return scene.entries()[-1].manifest

    # Not as fast as it goes: the guest has one processor, and snapmgr wants some of it, too.
    taken, fared = take(scene.context(), scene.server, count, writers=2, pause_s=0.05, take_one=backup)
    assert fared.writes > 0
    assert len({one.manifest.position for one in taken}) == count
    members = [member.ref.name for one in taken for member in one.manifest.members]
    assert scene.stored() == sorted(members)
    return taken
