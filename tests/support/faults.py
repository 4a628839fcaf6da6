"""Runs the real command line with faults injected at the system-call level (see faults.c)."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@cache
def _library() -> Path:
    """Compile faults.c once a test run."""
    folder = Path(tempfile.mkdtemp(prefix="snapmgr-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return library


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What should go wrong; the default is nothing."""

    delay_s: float | None = None
    delay_mark: Path | None = None
    delay_skip: int = 0
    boot_id: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that make it happen."""
        variables = {"LD_PRELOAD": str(_library())}
        if self.delay_s is not None:
            variables["FAULT_DELAY_MS"] = str(round(self.delay_s * 1000))
        if self.delay_skip:
            variables["FAULT_DELAY_SKIP"] = str(self.delay_skip)
        if self.delay_mark is not None:
            variables["FAULT_DELAY_MARK"] = str(self.delay_mark)
        if self.boot_id is not None:
            variables["FAULT_BOOT_ID"] = str(self.boot_id)
        return variables


def start(
    config: Path,
    *arguments: str,
    faults: Faults | None = None,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    module: str = "snapmgr",
) -> subprocess.Popen[str]:
    """Start ``PREFIX… snapmgr --config CONFIG ARGUMENTS…``, in a session of its own; stdout and stderr are pipes."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", module, "--config", str(config), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (faults.environment() if faults else {}) | (environment or {}),
        start_new_session=True,
    )


def run(
    config: Path,
    *arguments: str,
    faults: Faults | None = None,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    module: str = "snapmgr",
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    with start(config, *arguments, faults=faults, environment=environment, prefix=prefix, module=module) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
