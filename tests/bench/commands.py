"""Whole processes side by side on one btrfs: a snapshot, and a list of 1,000, by snapmgr, snapper and btrbk.

    ./run measure commands --snapshots 1000 --repeats 15

Each tool lists snapshots of its own. Interleaved, so that the machine's moods hit all; medians, and the ratio to
snapmgr. A tool that is not installed (apt-get install snapper btrbk) is a row that says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import btrfsutil

from snapmgr.backup.run import backup
from support.scene import Scene, btrfs_scene

if TYPE_CHECKING:
    from collections.abc import Callable

_SNAPMGR = Path(sys.executable).with_name("snapmgr")
# As on an installed system: compiled modules are kept from one start to the next.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
_BTRBK = """
timestamp_format long-iso
snapshot_dir .btrbk
snapshot_create always
snapshot_preserve_min all
volume {top}
  subvolume mysql
"""


def seconds(argv: list[str]) -> float:
    """Run a program to its successful end; return how long it took, start of the process included."""
    start = time.monotonic()
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, env=_ENVIRONMENT)
    took = time.monotonic() - start
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.decode(errors='replace')}")
    return took


def fill(name: str, take: Callable[[int], object], count: int) -> None:
    """Take `count` snapshots, with progress."""
    for number in range(count):
        take(number)
        if sys.stderr.isatty():
            print(f"\r{name}: {number + 1} of {count}", end="", file=sys.stderr)


def tools(scene: Scene, count: int) -> dict[str, dict[str, list[str] | str]]:
    """Set every tool up with `count` snapshots of its own; return its command lines, or why it has none."""
    top = Path(scene.file_system.point)
    data = top / "mysql"
    scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n')
    ours = [str(_SNAPMGR), "--config", str(scene.config_file), "--quiet"]
    context = scene.context()
    fill("snapmgr", lambda _: backup(context, context.config.job("demo")), count)
    found: dict[str, dict[str, list[str] | str]] = {
        "snapmgr": {"take": [*ours, "backup", "demo"], "list": [*ours, "list"]}
    }
    if shutil.which("snapper") is None:
        found["snapper"] = {"take": "not installed", "list": "not installed"}
    else:
        snapper = ["snapper", "--no-dbus", "-c", "snapmgr-bench"]
        subprocess.run([*snapper, "create-config", str(data)], check=True)
        fill("snapper", lambda _: seconds([*snapper, "create"]), count)
        found["snapper"] = {"take": [*snapper, "create"], "list": [*snapper, "list"]}
    if shutil.which("btrbk") is None:
        found["btrbk"] = {"take": "not installed", "list": "not installed"}
    else:
        (top / ".btrbk").mkdir()
        configuration = scene.folder / "btrbk.conf"
        configuration.write_text(_BTRBK.format(top=top))
        # Named as btrbk names them, but made by the ioctl: a thousand runs of btrbk would take many minutes.
        fill(
            "btrbk",
            lambda number: btrfsutil.create_snapshot(
                str(data),
                str(
                    top
                    / ".btrbk"
                    / f"mysql.202601{1 + number // 1440:02}T{number // 60 % 24:02}{number % 60:02}00+0000"
                ),
                read_only=True,
            ),
            count,
        )
        btrbk = ["btrbk", "-q", "-c", str(configuration)]
        found["btrbk"] = {"take": [*btrbk, "snapshot"], "list": [*btrbk, "list", "snapshots"]}
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        scene = stack.enter_context(btrfs_scene(size_bytes=3 << 30, server=False))
        stack.callback(_forget_snapper)
        for number in range(100):
            (Path(scene.file_system.point) / "mysql" / f"file{number}").write_bytes(b"x" * 4096)
        lines = tools(scene, arguments.snapshots)
        bare = {"import click": [sys.executable, "-c", "import click"], "help": [str(_SNAPMGR), "--help"]}
        samples: dict[tuple[str, str], list[float]] = {}
        for _ in range(arguments.repeats):
            for tool, commands in lines.items():
                for what, argv in commands.items():
                    if isinstance(argv, list):
                        samples.setdefault((tool, what), []).append(seconds(argv))
            for what, argv in bare.items():
                samples.setdefault(("python" if what == "import click" else "snapmgr", what), []).append(seconds(argv))
    print(f"{arguments.repeats} repeats, {arguments.snapshots} snapshots of each tool; milliseconds")
    print(f"{'':24}{'median':>9}{'min':>9}{'max':>9}{'ratio':>8}")
    for (tool, what), values in sorted(samples.items(), key=lambda item: item[0][1]):
        ours = samples.get(("snapmgr", what))
        ratio = f"{statistics.median(values) / statistics.median(ours):8.1f}" if ours else ""
        row = [statistics.median(values), min(values), max(values)]
        print(f"{tool + ' ' + what:24}" + "".join(f"{value * 1000:9.0f}" for value in row) + ratio)
    for tool, commands in lines.items():
        if isinstance(commands["take"], str):
            print(f"{tool}: {commands['take']}")


def _forget_snapper() -> None:
    """Remove the benchmark's entry from snapper's list of configurations."""
    Path("/etc/snapper/configs/snapmgr-bench").unlink(missing_ok=True)
    path = Path("/etc/default/snapper")
    if path.exists():
        # Its one line that names ours; whatever else is in the file is the machine's.
        lines = path.read_text().splitlines(keepends=True)
        mended = [
            re.sub(r"( ?\bsnapmgr-bench\b)", "", line) if line.startswith("SNAPPER_CONFIGS=") else line
            for line in lines
        ]
        path.write_text("".join(mended))


if __name__ == "__main__":
    main()
