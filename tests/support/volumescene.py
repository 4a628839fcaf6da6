"""A job for a folder on a logical volume; commands run in forked children: a new interpreter takes seconds in a guest.

What LVM's own programs do can be watched and cut short: by `Strike`, one of them is killed, or stopped, at one of the
system calls by which it changes something.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from snapmgr.cli.main import main
from snapmgr.system import command
from support import lvm, tracer
from support.scene import Scene
from support.storage import LoopFileSystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# linux/dm-ioctl.h: all that changes a device. _IOWR(0xfd, number, struct dm_ioctl), which has 312 bytes.
_DM_CHANGES = {
    f"ioctl-0xc138fd{number:02x}": name
    for number, name in ((3, "create"), (4, "remove"), (5, "rename"), (6, "suspend"), (9, "load"), (14, "message"))
}
_IO_SUBMIT = "syscall-209"


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What is to happen to the first call of a program of LVM."""

    program: str
    """ "lvcreate"."""
    log: Path
    """Where each of its system calls that changes something is written down; see support.tracer."""
    kill: tracer.Kill | None = None
    with_us: bool = False
    """Whether the command and its helper are killed as well, right after it."""

    def changes(self) -> list[tracer.Call]:
        """Return its calls that changed a device, or read or wrote LVM's metadata, named so, once it has run."""
        return [
            tracer.Call(role=0, number=call.number, name=_DM_CHANGES.get(call.name, "metadata"), detail="")
            for call in tracer.read_log(self.log).calls
            if call.role == 0 and (call.name in _DM_CHANGES or call.name == _IO_SUBMIT)
        ]


class VolumeScene(Scene):
    """A logical volume with a job "demo" for the folder "data" on it."""

    def __init__(self, folder: Path, origin: lvm.Origin) -> None:
        file_system = LoopFileSystem(
            point=origin.point, device=origin.device, image=Path(origin.device), fs_type=origin.fs_type
        )
        super().__init__(file_system, folder, None)
        self.origin = origin

    @property
    def data(self) -> Path:
        """The folder that the job takes."""
        return self.origin.point / "data"

    def call(
        self, *arguments: str, first: Callable[[], object] = _nothing, strike: Strike | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line in a forked child, after `first`; a negative exit code is the signal that ended it."""
        return self.begin(*arguments, first=first, strike=strike).end()

    def begin(self, *arguments: str, first: Callable[[], object] = _nothing, strike: Strike | None = None) -> Running:
        """Start the command line in a forked child."""
        out, err = os.memfd_create("out"), os.memfd_create("err")
        if strike is not None:
            tracer.program()  # compiled by us, who remove it
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                for target, source in ((1, out), (2, err)):
                    os.dup2(source, target)
                # Not pytest's, which lead elsewhere.
                sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", closefd=False) for fd in (1, 2))
                os.setsid()
                if strike is not None:
                    self._set_trap(strike)
                first()
                code = main(["--config", str(self.config_file), *arguments])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return Running(pid=pid, out=out, err=err, arguments=arguments)

    def _set_trap(self, strike: Strike) -> None:
        folder = self.folder / "programs"
        folder.mkdir(exist_ok=True)
        trap = folder / strike.program
        real = command.find_program(strike.program)
        kill = strike.kill.argument if strike.kill else "-"
        # Only the first call: what clears up after it runs as always.
        lines = ["#!/bin/sh", 'rm "$0"', f'{tracer.program()} {strike.log} {kill} {real} "$@"', "code=$?"]
        lines += [f"kill -KILL {os.getpid()} $PPID"] if strike.with_us else []
        trap.write_text("\n".join([*lines, "exit $code", ""]))
        trap.chmod(0o755)
        command.PROGRAM_PATH = f"{folder}:{command.PROGRAM_PATH}"

    def ok(self, *arguments: str) -> str:
        """Run a command that must succeed and return its stdout."""
        done = self.call(*arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def ours(self) -> list[str]:
        """Return the names of all logical volumes with our names."""
        return [row["lv_name"] for row in lvm.report("lvs", "-o", "lv_name") if row["lv_name"].startswith("snapmgr")]


def suspended() -> list[str]:
    """Return the device-mapper devices that stand still."""
    names = []
    for file in Path("/sys/block").glob("dm-*/dm/suspended"):
        # One that goes away meanwhile stands still no more.
        with suppress(OSError):
            if file.read_text().strip() == "1":
                names.append((file.parent / "name").read_text().strip())
    return names


@dataclass(frozen=True, kw_only=True)
class Running:
    """A command line that runs in a child."""

    pid: int
    out: int
    err: int
    arguments: tuple[str, ...]

    def end(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for fd in (self.out, self.err):
            os.lseek(fd, 0, os.SEEK_SET)
            with os.fdopen(fd, encoding="utf-8") as file:
                texts.append(file.read())
        return subprocess.CompletedProcess(self.arguments, code, *texts)


@contextmanager
def volume_scene(
    vg: lvm.VolumeGroup, kind: Literal["classic", "thin"], *, size_mib: int = 0, job: str = "", backend: str = ""
) -> Iterator[VolumeScene]:
    """Yield a scene on a thin volume with XFS, or a classic one with ext4.

    `backend` and `job` are further lines of the configuration.
    """
    with work_folder() as folder:
        if kind == "thin":
            if "pool" not in vg.names():
                vg.pool(data_mib=1024)
            origin = vg.thin_origin(size_mib=size_mib or 320, fs_type="xfs")
        else:
            origin = vg.classic_origin(size_mib=size_mib or 64, fs_type="ext4")
        scene = VolumeScene(folder, origin)
        scene.data.mkdir()
        (scene.data / "file").write_text("data")
        scene.configure(
            text=f'[backend.lvm]\ncow_size = "50%"\nscratch_dir = "{folder}/cow"\n{backend}\n'
            f'[job.demo]\nbackend = "lvm"\nsource = "directory"\npath = "{scene.data}"\n'
            # A forecast from the seconds of a test says nothing.
            f'capacity_warn_within = "0"\n{job}\n'
        )
        yield scene
