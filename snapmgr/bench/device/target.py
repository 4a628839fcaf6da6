"""Opens the place for the benchmark's file systems: a loop device of its own, or an unused device.

Only devices from `opened_target` are ever formatted. Such a device is unused, and it is blank, holds data of an earlier
run, or was named by its serial number with --wipe. See docs/reference/benchmark-devices.md.
"""

from __future__ import annotations

import os
import shlex
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from snapmgr.bench.device.blockdevice import claimed, examined, node_of, opened_device, require_size, title_of
from snapmgr.bench.device.loopfile import MIB, loop_target, require_room
from snapmgr.contract.errors import ConfigError, MissingRequirementError
from snapmgr.contract.units import format_size, parse_size
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from snapmgr.contract.backend import Runner

DEFAULT_FOLDER = "/var/tmp"  # noqa: S108 - on a disk, unlike /tmp and /run, which often are memory; the file has no name
_FORMS = "--on takes loop:SIZE, loop:SIZE:FOLDER, a block device or a folder"


class OpenTarget(Protocol):
    """A target that belongs to us while its context lasts."""

    device: str
    """Device node: "/dev/loop3"."""
    size_bytes: int
    """Size of its usable part, from its beginning; the rest is not written."""
    kind: Literal["loop", "device"]
    title: str
    """For people: model, serial number and size."""
    discard: bool
    """Whether its blocks are discarded between samples if possible; a device in a steady state is not discarded."""

    def check(self) -> None:
        """Raise StorageError if the target has changed or is in use. Called before each mkfs."""

    def blank(self) -> None:
        """Check it, remove all signatures, and discard a device's blocks if possible. Called between samples."""

    def made(self) -> None:
        """Mark its contents as ours, so that after a SIGKILL the next run accepts them without --wipe."""

    def facts(self) -> dict[str, Any]:
        """Return its description as JSON, without serial number."""


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """The parsed value of --on."""

    kind: Literal["loop", "device"]
    path: str
    """Real, absolute path of the folder or the device."""
    size_bytes: int | None
    """Size of the loop device's file; None for a device."""


def parse_target(text: str, *, size_bytes: int | None = None, folder: str = DEFAULT_FOLDER) -> TargetSpec:
    """Parse the value of --on. Raises ConfigError.

    The caller needs `size_bytes`: a file in a FOLDER gets this size, and a smaller SIZE is refused. `folder` is the
    default FOLDER.
    """
    if text.startswith("loop:"):
        size_text, _, given = text.removeprefix("loop:").partition(":")
        try:
            size = parse_size(size_text)
        except ValueError as error:
            raise ConfigError(f"--on {text}: {error}", hint=f"{_FORMS}; for example: --on loop:4G") from None
        return _loop_spec(text, given or folder, size, size_bytes)
    try:
        path = os.path.realpath(text, strict=True)
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--on {text}: {why}", hint=_FORMS) from None
    if stat.S_ISBLK(mode):
        return TargetSpec(kind="device", path=node_of(path), size_bytes=None)
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"--on {text}: this is neither a block device nor a folder", hint=_FORMS)
    if size_bytes is None:
        raise ConfigError(f"--on {text}: the size of the file is missing", hint=f"--on loop:SIZE:{shlex.quote(text)}")
    return _loop_spec(text, path, size_bytes, size_bytes)


def _loop_spec(text: str, folder: str, size: int, needed: int | None) -> TargetSpec:
    if not os.path.isdir(folder):
        raise ConfigError(f"--on {text}: {folder} is not a folder", hint="--on loop:SIZE:FOLDER")
    size = -(-size // MIB) * MIB
    require_size(f"--on {text}", size, needed)
    return TargetSpec(kind="loop", path=os.path.realpath(folder), size_bytes=size)


@contextmanager
def opened_target(
    text: str,
    *,
    size_bytes: int | None,
    wipe: str | None,
    written: bool = True,
    line: Sequence[str] = ("snapmgr", "bench", "run"),
    runner: Runner | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Iterator[OpenTarget]:
    """Yield the target named by `text`, the value of --on; it is blank, and ours until the context ends.

    Args:
        text: loop:SIZE[:FOLDER], a block device or a folder.
        size_bytes: minimum size, and the size of a file in a folder.
        wipe: the serial number (or its substitute from a refusal) of a device whose content may be destroyed.
        written: whether each block of such a file is written beforehand; see `loopfile.loop_target`.
        line: the user's command without --on and --wipe, for the line to paste that a refusal shows.
        runner: runs wipefs, blkid and blkdiscard.
        tell: receives a message about each slow step.

    Raises ConfigError (2) for a target that must not be formatted, BusyError (3) if another run uses it,
    MissingRequirementError (7) without root or loop devices, StorageError and CommandError.
    """
    spec = parse_target(text, size_bytes=size_bytes)
    runner = runner or CommandRunner()
    _require_root()
    if spec.kind == "loop":
        if wipe is not None:
            raise ConfigError(
                "--wipe is for devices only: the file of a loop device is always new", hint="remove --wipe"
            )
        with loop_target(Path(spec.path), spec.size_bytes or 0, runner=runner, written=written, tell=tell) as target:
            yield target
        return
    with opened_device(spec.path, needed=size_bytes, wipe=wipe, line=line, runner=runner) as device:
        yield device


def preview_target(
    text: str, *, size_bytes: int | None, wipe: str | None, line: Sequence[str] = ("snapmgr", "bench", "run")
) -> str:
    """Describe the target that `opened_target` would open, without changing it; raises the same errors."""
    spec = parse_target(text, size_bytes=size_bytes)
    if spec.kind == "loop":
        fs_type = require_room(Path(spec.path), spec.size_bytes or 0)
        return f"a loop device on a file of {format_size(spec.size_bytes or 0)} in {spec.path} ({fs_type})"
    _require_root()
    with claimed(spec.path) as fd:
        device, identity, _found = examined(
            spec.path, fd, needed=size_bytes, wipe=wipe, line=line, runner=CommandRunner()
        )
    return title_of(device, identity)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise MissingRequirementError("making and mounting file systems needs root", hint="run it as root (sudo)")
