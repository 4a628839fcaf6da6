"""Provides `JuicefsBackend`: snapshots as clones of folders in a JuiceFS volume, made by its client program."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from snapmgr.api import (
    API_VERSION,
    ClientOptions,
    Found,
    Gauge,
    Mounter,
    NotMine,
    Pool,
    Provisioned,
    ProvisionOrder,
    Reason,
    Runner,
    StorageError,
    StorageMaker,
    Target,
    Volume,
    provisioned,
)
from snapmgr.api.copystore import CopyFolder, CopyStoreBackend, Folder, FolderCopy, Origin, Store, clone_beside
from snapmgr.api.kernel import lies_in, shown
from snapmgr_juicefs import client as clients
from snapmgr_juicefs import leftovers, locating, private, provisioning
from snapmgr_juicefs.cloning import ClientClone, was_interrupted
from snapmgr_juicefs.config import JuicefsConfig
from snapmgr_juicefs.program import Juicefs, find_juicefs, install_hint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from snapmgr.api import ClientMount, Mount
    from snapmgr_juicefs.program import Address
    from snapmgr_juicefs.tree import Flushed

_PRIVATE_MOUNT = "mount@"


class JuicefsBackend(CopyStoreBackend):
    """See `snapmgr.api.Backend` for the contract; docs/reference/backends/juicefs.md describes this one."""

    name: ClassVar[str] = "juicefs"
    api_version: ClassVar[int] = API_VERSION
    Config: ClassVar[type[JuicefsConfig]] = JuicefsConfig
    shared: ClassVar[bool] = True
    config: JuicefsConfig

    def __init__(self, config: JuicefsConfig, runner: Runner, mounter: Mounter) -> None:
        """Store the arguments."""
        super().__init__(config, runner, mounter)
        self._program = Juicefs(runner, config.program)

    def missing(self) -> tuple[Reason, ...]:
        """Return the missing requirements, including the client program."""
        if find_juicefs(self.config.program) is not None:
            return super().missing()
        program = Reason(
            what=f"the program {self.config.program or 'juicefs'} is not installed",
            hint=install_hint(),
        )
        return (*super().missing(), program)

    def locate(self, target: Target) -> Volume | NotMine:
        """Find a place for clones of `target` in its volume, with warnings about the volume."""
        mounts = self.mounter.mounts()
        volume = locating.locate(target, mounts, self.config, self.name)
        own = clients.own_mount(target.path, mounts)
        if isinstance(volume, NotMine) or own is None:
            return volume
        found, now = clients.recognise(own), time.time()
        said = locating.warnings(found, self.config, self._program, now)
        with suppress(StorageError), self.opened(self.find_store(volume.pool)) as store:
            left = leftovers.warning(leftovers.read(store.fd), now)
            said += (left,) if left else ()
        return replace(volume, warnings=said)

    def volume_id(self, path: str, fd: int) -> str:
        """Return the volume's UUID and the inode of an open folder in it."""
        own, _ = self._own_mount(path)
        return f"{clients.recognise(own).uuid}:{os.fstat(fd).st_ino}"

    def _own_mount(self, path: str) -> tuple[Mount, str]:
        """Return the client's own mount of a real path, and the path in that mount. Raises StorageError."""
        mounts = self.mounter.mounts()
        own = clients.own_mount(path, mounts)
        if own is None:
            raise StorageError(f"{shown(path)} is not on JuiceFS", hint="is the volume mounted?")
        return own, clients.translate(path, mounts, own)

    def find_store(self, pool: Pool) -> str:
        """Return the path of a pool's store in a mount of its volume."""
        return locating.find_store(pool, self.mounter.mounts())[1]

    def find_origin(self, volume: Volume) -> Origin:
        """Return the places of the volume and its store in the client's own mount: a clone cannot leave that."""
        own, path = self._own_mount(volume.path)
        found = clients.recognise(own)
        uuid, _, inside = volume.pool.id.partition(":")
        store = found.outside(inside) if found.uuid == uuid else None
        if store is None:
            raise StorageError(
                f"{shown(own.point)} does not show the store {shown(inside)} of {shown(volume.path)} any more",
                hint="try again",
            )
        return Origin(path=path, store=store, volatile=found.writeback)

    def headroom(self, volume: Volume) -> tuple[Gauge, ...]:
        """Return the volume's capacity, if limited: a clone counts with its full size, although it shares its data."""
        client, _ = locating.find_store(volume.pool, self.mounter.mounts())
        if not client.capacity_bytes:
            return ()
        _, path = self._own_mount(volume.path)
        return (replace(_capacity(client, volume.pool), wanted_bytes=self._program.summarise(path)[0]),)

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:
        """Return the capacity of each volume that has one; see `snapmgr.api.CapacityReporting.gauges`.

        An object store has no size. The local cache is none either: the client keeps a share of its file system free,
        and uploads directly where there is no room to stage.
        """
        found = []
        for pool in pools:
            client, store = locating.find_store(pool, self.mounter.mounts())
            if not os.path.isdir(store):
                raise StorageError(f"the store {shown(store)} is missing", hint="see: snapmgr doctor")
            if client.capacity_bytes:
                found.append(_capacity(client, pool))
        return tuple(found)

    def new_copy(self, source: Folder, target: Folder) -> FolderCopy:
        """Return a clone by the client program."""
        return ClientClone(source, target, program=self._program, runner=self.runner, check_room=self._check_room)

    def _check_room(self, seen: Flushed, store: str) -> None:
        own, _ = self._own_mount(store)
        locating.refuse_full(seen, store, clients.recognise(own), self.config, self._program)

    def clone_folder(self, source: str, target: str) -> None:
        """See `snapmgr.api.FolderCloning`."""
        mounts = self.mounter.mounts()
        parent, name = os.path.split(os.path.abspath(target))
        real, folder = os.path.realpath(source), os.path.realpath(parent)
        own = clients.own_mount(real, mounts)
        if own is None or clients.own_mount(folder, mounts) != own:
            raise StorageError(
                f"{shown(source)} and {shown(folder)} are not in one mount of a JuiceFS volume",
                hint="name a folder in the same mount",
            )
        inside = os.path.join(clients.translate(folder, mounts, own), name)
        clone_beside(clients.translate(real, mounts, own), inside, self.new_copy, self.remove_folder)

    def settle_copy(self, folder: CopyFolder, pool: Pool, deadline: float) -> None:  # noqa: ARG002 - uploads are the client's
        """Wait until the local caches have uploaded everything."""
        mounts = self.mounter.mounts()
        seen, _ = locating.find_store(pool, mounts)
        # Any client of this machine may have written the origin, perhaps with writeback. Ignore clients of other
        # volumes: one that hangs would delay us.
        own = [one for one in mounts if one.source == seen.mount.source and not lies_in(one.point, private.root())]
        for found in clients.clients(own, first=pool.hint):
            if found.uuid == seen.uuid:
                clients.wait_uploaded(found, max(deadline - time.monotonic(), 0.0))

    def remove_folder(self, folder: Folder, name: str) -> None:
        """Have the client remove a folder; a snapshot's copy goes to the volume's trash unless configured otherwise."""
        snapshot = isinstance(folder, CopyFolder) and folder.mark is not None and folder.mark.kind == "snapshot"
        whole = isinstance(folder, CopyFolder) and folder.state == "complete"
        to_trash = snapshot and whole and not self.config.skip_trash
        # Only root may bypass the trash.
        self._program.remove(f"{folder.path}/{name}", skip_trash=not to_trash and os.geteuid() == 0)

    def await_space(self, store: Store) -> None:
        """Do not wait: the volume's trash frees space only after days."""

    def remove(self, folder: CopyFolder) -> None:
        """Remove a copy folder, and remember an interrupted clone in it."""
        self.refuse_mounted(folder)
        if was_interrupted(folder):
            leftovers.note(folder.store.fd, time.time())
        self.discard(folder)

    def inventory(self, pools: tuple[Pool, ...], *, notes: bool = True) -> tuple[Found, ...]:
        """Read the store, and find garbage of interrupted clones and abandoned private mounts."""
        listed = list(super().inventory(pools, notes=notes))
        for pool in pools:
            with self.opened(self.find_store(pool)) as store:
                if leftovers.is_due(leftovers.read(store.fd), time.time()) and self._address(pool) is not None:
                    listed.append(
                        Found(
                            kind="debris",
                            pool=pool,
                            name=leftovers.NAME,
                            why="an interrupted clone may have left metadata that nothing refers to",
                            cure="collects garbage in the volume (juicefs gc --delete), which may take long",
                        )
                    )
            listed += [
                Found(
                    kind="debris",
                    pool=pool,
                    name=f"{_PRIVATE_MOUNT}{record.id}",
                    why="the process that used this private mount is gone",
                    cure="uploads the rest of its cache, unmounts and removes it",
                )
                for record in private.abandoned(pool.id.partition(":")[0])
            ]
        return tuple(listed)

    def repair(self, found: Found) -> None:
        """Remove debris of the store, remove an abandoned mount, or collect garbage of interrupted clones."""
        if found.name.startswith(_PRIVATE_MOUNT):
            identity = found.name.removeprefix(_PRIVATE_MOUNT)
            private.clear(identity, self._program, self.runner, self.mounter, self._address(found.pool))
        elif found.name == leftovers.NAME:
            self._collect(found.pool)
        else:
            super().repair(found)

    def _collect(self, pool: Pool) -> None:
        with self.opened(self.find_store(pool)) as store:
            now, address = time.time(), self._address(pool)
            if address is not None and leftovers.is_due(leftovers.read(store.fd), now):
                self._program.gc(address)
                leftovers.forget_due(store.fd, now)

    def _address(self, pool: Pool) -> Address | None:
        found, _ = locating.find_store(pool, self.mounter.mounts())
        return locating.address_of(found, self.config)

    @contextmanager
    def client_mount(self, path: str, options: ClientOptions) -> Iterator[ClientMount]:
        """See `snapmgr.api.Remounting`."""
        own, inner = self._own_mount(os.path.realpath(path))
        found = clients.recognise(own)
        address = locating.address_of(found, self.config)
        if address is None:
            raise StorageError(
                f"the address of the metadata of {found.name} is not known", hint="set meta_url in [backend.juicefs]"
            )
        # A folder without any snapshot is not in the pools that doctor checks.
        for record in private.abandoned(found.uuid):
            with suppress(StorageError):
                private.clear(record.id, self._program, self.runner, self.mounter, address)
        with private.mounted(
            found,
            os.path.relpath(inner, own.point),
            options,
            program=self._program,
            runner=self.runner,
            mounter=self.mounter,
            address=address,
            cache_root=self.config.cache_root,
        ) as mounted:
            yield mounted

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make this storage on a blank device; see `snapmgr.api.Provisioner`."""
        maker = StorageMaker(self.runner, self.mounter, device, order)
        return provisioned(self, device, order, lambda: provisioning.make(maker, self._program.path))

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Take it down; see `snapmgr.api.Provisioner`."""
        private.forget(os.path.realpath(order.point), self._program, self.runner, self.mounter)
        provisioning.unmake(self.runner, self.mounter, device, order)


def _capacity(client: clients.Client, pool: Pool) -> Gauge:
    try:
        room = os.statvfs(client.point)
    except OSError as error:
        raise StorageError(f"cannot look at {shown(client.point)}: {error.strerror}") from error
    size_bytes = room.f_blocks * room.f_frsize
    return Gauge(
        name=f"the capacity of the JuiceFS volume {client.name}",
        size_bytes=size_bytes,
        used_bytes=size_bytes - room.f_bavail * room.f_frsize,
        when_full="origin_errors",
        pool=pool,
    )
