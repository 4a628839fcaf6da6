"""Makes a fresh file system on one stack and measures on it; see `snapmgr.bench.model.Workbench`."""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import asdict

from snapmgr.backup.flush import flush_until_short
from snapmgr.bench.fio import run_fio
from snapmgr.bench.measure.caches import drop_caches
from snapmgr.bench.measure.counters import Counters
from snapmgr.bench.measure.layout import read_layout
from snapmgr.bench.measure.quiet import wait_until_idle
from snapmgr.bench.storage.leftovers import restored
from snapmgr.bench.storage.scene import end_users, staged
from snapmgr.bench.storage.stacks import backend_of, backend_table, cloning_of, provisioner_of
from snapmgr.contract.backend import Readying
from snapmgr.contract.errors import MissingRequirementError, StorageError
from snapmgr.contract.records import AttachRecord, NotMine
from snapmgr.system.blockdev import find_target
from snapmgr.system.boot import boot_id
from snapmgr.system.mount import KernelMounter, mounted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from snapmgr.bench.fio import FioRun, Section
    from snapmgr.bench.measure.layout import BlockLayout
    from snapmgr.bench.model import Measuring, Parameters, Stack
    from snapmgr.bench.storage.scene import Scene
    from snapmgr.contract.abilities import FolderCloning
    from snapmgr.contract.backend import Backend, Held, Runner
    from snapmgr.contract.records import Capabilities, Completed, Found, Provisioned, SnapshotRef, Usage, Volume

_FIRE_S = 60.0
_SETTLE_S = 600.0
FLUSH_TARGET_S = 0.05
"""The default of a job's `sync_target`."""
# A load that has just ended (io_uring, a killed process) holds a mount a moment longer.
_UNMOUNT_S = 5.0


class Recorder:
    """A `Runner` that records its commands."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.commands: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], **options: Any) -> Completed:  # noqa: ANN401 - those of Runner.run
        """See `snapmgr.api.Runner.run`."""
        self.commands.append(tuple(argv))
        return self._runner.run(argv, **options)

    def hold(self, argv: Sequence[str]) -> Held:
        """See `snapmgr.api.Runner.hold`."""
        self.commands.append(tuple(argv))
        return self._runner.hold(argv)


class BenchSnapshot:
    """See `snapmgr.bench.model.Snapshot`."""

    def __init__(self, bench: StackWorkbench, backend: Backend, ref: SnapshotRef, subpath: str) -> None:
        self._bench = bench
        self._backend = backend
        self._subpath = subpath
        self.ref = ref
        self.create_s = 0.0
        self.whole_s = 0.0

    @contextmanager
    def opened(self, *, writable: bool = False) -> Iterator[Path]:
        """Attach it as a backup's `mount` does, privately, and yield the folder that corresponds to the path."""
        record = AttachRecord(id=secrets.token_hex(8), ref=self.ref, writable=writable, boot_id=boot_id())
        point = str(self._bench.scene.folder / f"snapshot-{record.id}")
        try:
            attachment = self._backend.attach(record)
            with mounted(attachment, point, writable=writable, patience_s=_UNMOUNT_S) as folder:
                yield folder / self._subpath
        finally:
            self._backend.detach(record)

    def usage(self) -> Usage:
        """Return its exact usage according to the backend."""
        return self._backend.usage(self.ref, exact=True)

    def delete(self, *, wait: Literal["name", "space"] = "space") -> float:
        """Delete it and wait for its space or for its name; return the seconds."""
        start = time.monotonic()
        self._backend.delete(self.ref, wait=wait)
        return time.monotonic() - start


class StackWorkbench:
    """See `snapmgr.bench.model.Workbench`."""

    def __init__(
        self,
        stack: Stack,
        parameters: Parameters,
        *,
        backend: Backend | None,
        scene: Scene,
        provisioned: Provisioned,
        folder: Path,
        runner: Runner,
        tell: Callable[[str], None],
    ) -> None:
        self.stack = stack
        self.parameters = parameters
        self.folder = folder
        self.path = Path(provisioned.path)
        self.scene = scene
        self.provisioned = provisioned
        self._backend = backend
        self._volume: Volume | None = None
        self._guarantee: Capabilities | None = None
        self._plain = runner
        self._runner = Recorder(runner)
        self._tell = tell
        self._counters = Counters(provisioned.devices)
        self._jobs: dict[str, str] = {}

    def snapshot(self, held: AbstractContextManager[object] | None = None) -> BenchSnapshot:
        """Take one as a backup does, but without a helper process, because no server waits for a hung storage call."""
        backend, volume = self._located()
        start = time.monotonic()
        with backend.arm((volume,), _new_id()) as armed:
            flush_until_short(armed, FLUSH_TARGET_S)
            if isinstance(armed, Readying):
                armed.get_ready()
            armed.launched = True
            with held or nullcontext():
                fired = time.monotonic()
                shots = armed.fire(fired + _FIRE_S)
                create_s = time.monotonic() - fired
        refs = tuple(shot.ref for shot in shots)
        backend.settle(refs, _SETTLE_S)
        made = BenchSnapshot(self, backend, refs[0], volume.subpath)
        made.create_s, made.whole_s = create_s, time.monotonic() - start
        return made

    def at_once(self) -> bool:
        """Ask the backend."""
        backend, volume = self._located()
        return backend.capabilities((volume,)).atomicity == "volume"

    def inventory(self) -> tuple[Found, ...]:
        """Return the backend's inventory of the volume's pool."""
        backend, volume = self._located()
        return backend.inventory((volume.pool,))

    def cloning(self) -> FolderCloning | None:
        """Return the means to clone a folder in the volume."""
        if self._backend is None:
            return None
        return cloning_of(self._backend, str(self.path), self._plain, KernelMounter())

    def _located(self) -> tuple[Backend, Volume]:
        if self._backend is None:
            raise MissingRequirementError(
                f"the stack {self.stack.name} has no snapshots", hint="it is a control: it is only compared with others"
            )
        if self._volume is None:
            volume = self._backend.locate(find_target(str(self.path), runner=self._plain))
            if isinstance(volume, NotMine):
                raise StorageError(f"the backend {self.stack.backend} refuses its own storage: {volume.reason}")
            self._volume = volume
            self._guarantee = self._backend.capabilities((volume,))
        return self._backend, self._volume

    def measured(self) -> AbstractContextManager[Measuring]:
        """Measure costs while the context lasts."""
        return self._counters.measured()

    def fio(self, name: str, sections: Mapping[str, Section]) -> FioRun:
        """Run fio under `path`; its files go to `folder`."""
        done = run_fio(name, sections, directory=self.path, keep=self.folder, runner=self._runner)
        self._jobs[name] = done.job_file
        return done

    def run(self, argv: Sequence[str], *, timeout_s: float | None = None) -> Completed:
        """Run a program, recorded."""
        return self._runner.run(argv, timeout_s=timeout_s)

    def cold(self) -> None:
        """Drop the caches that would answer reads instead of the storage: the kernel's and the client's.

        Raises MissingRequirementError where they cannot be dropped (a container).
        """
        drop_caches(self.provisioned.cache_dirs)

    def quiet(self) -> float:
        """Wait until the background work is done; return the seconds."""
        return wait_until_idle(self.path, self.provisioned.devices, self._plain, self._tell)

    def layout(self, file: Path) -> BlockLayout:
        """Return where the file's blocks are, after a flush."""
        return read_layout(file)

    def tell(self, text: str) -> None:
        """Report the current step."""
        self._tell(text)

    def record(self) -> dict[str, Any]:
        """Return its part of the sample's document: `commands`, `jobs` (files of fio), `provisioned`, `guarantee`."""
        facts = asdict(self.provisioned)
        made = facts.pop("commands")
        return {
            "commands": [list(argv) for argv in (*made, *self._runner.commands)],
            "jobs": dict(self._jobs),
            "provisioned": facts | {"memory_bounded": self.scene.memory_bounded},
            "guarantee": asdict(self._guarantee) if self._guarantee else None,
        }


def _new_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


@contextmanager
def workbench(
    stack: Stack,
    parameters: Parameters,
    *,
    device: str,
    size_bytes: int,
    folder: Path,
    runner: Runner,
    tell: Callable[[str], None],
    discard: bool = True,
) -> Iterator[StackWorkbench]:
    """Make a stack's storage on a device, yield a workbench on it, and always remove everything at the end.

    Args:
        stack: one of `snapmgr.bench.storage.stacks.STACKS`.
        parameters: kept with the sample.
        device: its contents are lost: the caller must ensure that nobody needs them.
        size_bytes: size of the used part; the rest is not touched.
        folder: folder for small files, on another file system.
        runner: runs all programs.
        tell: shows the current step.
        discard: whether the whole device is discarded beforehand.

    This process gets its own mount namespace. Raises MissingRequirementError for missing requirements of this machine,
    StorageError.
    """
    mounter = KernelMounter()
    backend = backend_of(stack, backend_table(stack, parameters), runner, mounter)
    provisioner = provisioner_of(stack, backend, runner, mounter)

    with staged(
        provisioner,
        device,
        backend=stack.backend,
        size_bytes=size_bytes,
        options=stack.options,
        memory_bytes=parameters.memory_bytes,
        discard=discard,
        restore=lambda name: restored(name, runner),
    ) as scene:
        tell(f"making {stack.name} on {device}")
        with provisioner.provision(device, scene.order) as provisioned:
            try:
                yield StackWorkbench(
                    stack,
                    parameters,
                    backend=backend_of(
                        stack, backend_table(stack, parameters, point=scene.order.point), runner, mounter
                    ),
                    scene=scene,
                    provisioned=provisioned,
                    folder=folder,
                    runner=runner,
                    tell=tell,
                )
            finally:
                # A load that was interrupted may have left a daemon, and then nothing can be unmounted.
                end_users(scene.folder)
