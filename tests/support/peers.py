"""Other tools for snapshots on btrfs, each with snapshots of its own on a file system of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import btrfsutil

from support.history import unflushed
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

_SNAPPER_NAME = "snapmgr-bench"
_SNAPPER_RECORD = (
    '<?xml version="1.0"?>\n<snapshot><type>single</type><num>{number}</num><date>{date}</date></snapshot>\n'
)
_BTRBK = """
timestamp_format long-iso
snapshot_dir .btrbk
snapshot_create always
snapshot_preserve_min {keep}
{preserve}
volume {top}
"""


class Peer(Protocol):
    """A tool with the snapshots of a subvolume."""

    def fill(self, count: int) -> None:
        """Have `count` snapshots at least."""

    def argv(self, what: str) -> list[str] | None:
        """Return the command for "backup", "list", "prune --dry-run", "delete 10" or "backup --all"; None without."""


class Snapper:
    """snapper, with a configuration that `peers` removes again."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._origin = _subvolume(top)
        self._count = 0
        self._first = 1
        subprocess.run(["snapper", "--no-dbus", "-c", _SNAPPER_NAME, "create-config", str(self._origin)], check=True)

    def fill(self, count: int) -> None:
        """As snapper itself names and describes them, but made by the ioctl."""
        boxes = self._origin / ".snapshots"
        taken = [int(name.name) for name in boxes.iterdir()]
        start = max(taken, default=0) + 1
        self._first = min(taken, default=1)
        with unflushed(self._top):
            for number in range(start, start + count - len(taken)):
                box = boxes / str(number)
                box.mkdir()
                (box / "info.xml").write_text(_SNAPPER_RECORD.format(number=number, date="2026-01-01 00:00:00"))
                btrfsutil.create_snapshot(str(self._origin), str(box / "snapshot"), read_only=True)

    def argv(self, what: str) -> list[str] | None:
        """See `Peer`."""
        known = {
            "backup": ["create"],
            "list": ["list"],
            "delete 10": ["delete", f"{self._first}-{self._first + 9}"],
        }
        return ["snapper", "--no-dbus", "-c", _SNAPPER_NAME, *known[what]] if what in known else None


class Btrbk:
    """btrbk, with a configuration for each thing that it does."""

    def __init__(self, top: Path, folder: Path) -> None:
        self._top = top
        self._origin = _subvolume(top)
        self._snapshots = top / ".btrbk"
        self._snapshots.mkdir()
        self._folder = folder
        self._config("one", keep="all")
        self._config("prune", keep="latest", preserve="snapshot_preserve 48h 14d")

    def fill(self, count: int) -> None:
        """As btrbk itself names them, but made by the ioctl: a thousand runs of btrbk would take many minutes."""
        taken = len(list(self._snapshots.iterdir()))
        begin = datetime.now(UTC)
        with unflushed(self._top):
            for number in range(taken, count):
                name = f"data.{begin - timedelta(minutes=number + 1):%Y%m%dT%H%M%S+0000}"
                btrfsutil.create_snapshot(str(self._origin), str(self._snapshots / name), read_only=True)

    def argv(self, what: str) -> list[str] | None:
        """See `Peer`."""
        known = {
            "backup": ["one", "snapshot"],
            "list": ["one", "list", "snapshots"],
            "prune --dry-run": ["prune", "--dry-run", "prune"],
            "backup --all": ["many", "snapshot"],
        }
        if what not in known:
            return None
        config, *arguments = known[what]
        if config == "many" and not (self._folder / "many.conf").exists():
            names = [f"many/many{number:03}" for number in range(200)]
            (self._top / "many").mkdir()
            for name in names:
                btrfsutil.create_subvolume(str(self._top / name))
            self._config("many", *names, keep="all")
        return ["btrbk", "-q", "-c", str(self._folder / f"{config}.conf"), *arguments]

    def _config(self, name: str, *subvolumes: str, keep: str, preserve: str = "") -> None:
        text = _BTRBK.format(keep=keep, preserve=preserve, top=self._top)
        text += "".join(f"  subvolume {subvolume}\n" for subvolume in subvolumes or ("data",))
        (self._folder / f"{name}.conf").write_text(text)


def _subvolume(top: Path) -> Path:
    path = top / "data"
    btrfsutil.create_subvolume(str(path))
    for number in range(100):
        (path / f"file{number}").write_bytes(b"x" * 4096)
    return path


@contextmanager
def peers(*, size_bytes: int = 4 << 30) -> Iterator[dict[str, Peer]]:
    """Yield the tools that are installed, by name."""
    with ExitStack() as stack:
        found: dict[str, Peer] = {}
        if shutil.which("snapper"):
            top = stack.enter_context(loop_filesystem("btrfs", size_bytes)).point
            stack.callback(_forget_snapper)
            found["snapper"] = Snapper(top)
        if shutil.which("btrbk"):
            top = stack.enter_context(loop_filesystem("btrfs", size_bytes)).point
            found["btrbk"] = Btrbk(top, stack.enter_context(work_folder()))
        yield found


def _forget_snapper() -> None:
    """Remove the benchmark's entry from snapper's list of configurations."""
    Path(f"/etc/snapper/configs/{_SNAPPER_NAME}").unlink(missing_ok=True)
    path = Path("/etc/default/snapper")
    if path.exists():
        # Its one line that names ours; whatever else is in the file is the machine's.
        lines = path.read_text().splitlines(keepends=True)
        mended = [
            re.sub(rf"( ?\b{_SNAPPER_NAME}\b)", "", line) if line.startswith("SNAPPER_CONFIGS=") else line
            for line in lines
        ]
        path.write_text("".join(mended))
