"""A storage that can put its origin back, as one file that outlives whoever is killed; for restores in place."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from snapmgr.contract.records import Completed, Found, Mount, RevertPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.contract.errors import SnapmgrError
    from snapmgr.contract.records import Gauge, Pool, Reason, SnapshotRef

# Any device node whose number is known: nothing is done with it.
_DEVICE, _NUMBER = "/dev/null", "1:3"
KILLED = 9
"""Exit code of a process that died where it was to die."""


class World:
    """A volume, its snapshots and the mount table, all in one file: so they outlive the process that is killed.

    As a backend it is `Revertible`; as a runner it knows mount(8), as a mounter the table.
    """

    name = "fake"

    def __init__(self, folder: Path, *, consumes: bool) -> None:
        self.file = folder / "world.json"
        self.consumes = consumes
        self.plan: dict[str, Any] = {}
        self.fails: dict[str, SnapmgrError] = {}
        self.die_at: int | None = None
        self.lines: list[str] = []
        self.manifest: Manifest
        self.ref: SnapshotRef
        self.steps: list[str] = []
        self.data(now="new", snapshots={"n0": "old"}, token=None, merged=False, mounts=[])

    def data(self, **changes: Any) -> dict[str, Any]:
        """Return all that there is, after these changes."""
        data: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.file.write_text(json.dumps(data | changes))
        return data | changes

    def step(self, what: str) -> None:
        """Note a step; die or fail at it, if that is wanted."""
        if len(self.steps) == self.die_at:
            os._exit(KILLED)
        self.steps.append(what)
        if what in self.fails:
            raise self.fails[what]

    # The backend.

    def missing(self) -> tuple[Reason, ...]:
        """Nothing is."""
        return ()

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:  # noqa: ARG002
        """Nothing can run full."""
        return ()

    def inventory(self, pools: tuple[Pool, ...], *, notes: bool = True) -> tuple[Found, ...]:  # noqa: ARG002
        """Return the snapshots, a copy that is made among them."""
        (pool,) = pools
        found = self.data()["snapshots"]
        return tuple(
            Found(
                kind="snapshot", pool=pool, name=one, snapshot_id=self.manifest.id, ref=replace(self.ref, native_id=one)
            )
            for one in found
        )

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:  # noqa: ARG002
        """Forget the note; the snapshot must be there."""
        self.step("annotate")
        assert ref.native_id in self.data()["snapshots"]

    def revert_plan(self, ref: SnapshotRef) -> RevertPlan:  # noqa: ARG002
        """Return the plan, with `plan` instead of the usual."""
        fields: dict[str, Any] = {"origin": "vg/v", "device": _DEVICE, "number": _NUMBER, "consumes": self.consumes}
        return RevertPlan(**(fields | self.plan))

    def revert_state(self, ref: SnapshotRef, token: str) -> str:
        """Return the state, and go on a little."""
        data = self.data()
        if ref.native_id in data["snapshots"]:
            if data["token"] != token or not data["merged"]:
                return "none"
            # What the kernel does meanwhile.
            rest = {one: what for one, what in data["snapshots"].items() if one != ref.native_id}
            self.data(now="old", snapshots=rest)
            return "merging"
        return "done"

    def begin_revert(self, ref: SnapshotRef, token: str) -> None:
        """Begin, in two steps."""
        self.step("prepare")
        if self.revert_state(ref, token) == "none":
            assert not self.data()["mounts"], "it is mounted"
            copy = {} if self.consumes else {"copy": "old"}
            self.data(token=token, snapshots=self.data()["snapshots"] | copy)
            self.step("begin")
            self.data(merged=True)

    def cancel_revert(self, ref: SnapshotRef, token: str) -> None:
        """Remove what the first step of the beginning made."""
        self.step("cancel")
        assert self.revert_state(ref, token) == "none"
        data = self.data()
        self.data(token=None, snapshots={one: what for one, what in data["snapshots"].items() if one != "copy"})

    def finish_revert(self, ref: SnapshotRef, token: str) -> SnapshotRef | None:
        """Let the copy be the snapshot, if there is to be one."""
        self.step("finish")
        assert self.revert_state(ref, token) == "done"
        data = self.data(token=None)
        if self.consumes:
            return None
        self.data(snapshots={"n1": "old"} if "copy" in data["snapshots"] else data["snapshots"])
        return replace(ref, native_id="n1")

    # The mounter and the runner.

    def mounts(self) -> tuple[Mount, ...]:
        """Return the mount table."""
        rows = self.data()["mounts"]
        return tuple(Mount(**row | {"options": tuple(row["options"])}) for row in rows)

    def mount(self, point: str | Path, root: str = "/", number: str = _NUMBER, parent: int = 1) -> None:
        """Mount something."""
        rows = self.data()["mounts"]
        row = {"id": 100 + len(rows), "parent_id": parent, "device": number, "root": root, "point": str(point)}
        self.data(mounts=[*rows, row | {"fs_type": "ext4", "source": _DEVICE, "options": ["rw"]}])

    def unmount(self, point: str, *, mount_id: int) -> None:
        """Stand in for `snapmgr.system.mount.unmount`."""
        self.step(f"umount {os.path.basename(point)}")
        self.data(mounts=[row for row in self.data()["mounts"] if row["id"] != mount_id])

    def run(self, argv: Sequence[str], **_options: Any) -> Completed:
        """Know mount(8)."""
        assert argv[0] == "mount"
        if "--bind" in argv:
            self.step("bind")
            whole = next(row["point"] for row in self.data()["mounts"] if row["root"] == "/")
            self.mount(argv[-1], root=argv[2].removeprefix(whole))
        elif "remount" not in argv[2]:
            self.step("mount")
            self.mount(argv[-1])
        return Completed(argv=tuple(argv), returncode=0, stdout="", stderr="")
