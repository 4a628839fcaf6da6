"""Says how to install a Python package into the environment that snapmgr runs in."""

from __future__ import annotations

import os
import sys


def install_command(*packages: str) -> str:
    """Return a shell command that installs Python packages where this process finds them.

    A bare "pip" may be another environment's, or Debian's, which refuses to install (PEP 668).
    """
    import shlex  # noqa: PLC0415 - for messages alone
    import sysconfig  # noqa: PLC0415 - the same, and slow to import
    from importlib.util import find_spec  # noqa: PLC0415 - the same

    python = os.path.abspath(sys.executable)
    # Environments of uv and of `python3 -m venv --without-pip` have no pip; those of pipx have one.
    pip = ("uv", "pip", "install", "--python", python) if find_spec("pip") is None else (python, "-m", "pip", "install")
    command = shlex.join((*pip, *packages))
    managed = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if sys.prefix == sys.base_prefix and os.path.exists(managed):
        # Only what the distribution packages may go there.
        command += " (the system's Python refuses this: install snapmgr into a virtual environment first)"
    return command
