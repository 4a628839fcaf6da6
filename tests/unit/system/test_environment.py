"""The command that installs a package into our own environment, not into the one whose pip is in the PATH."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig

import pytest

from snapmgr.system.environment import install_command


def test_the_command_is_our_own_environments_pip_and_runs():
    words = shlex.split(install_command("snapmgr[btrfs]"))
    assert words[1:] == ["-m", "pip", "install", "snapmgr[btrfs]"]
    said = subprocess.run([*words[:3], "--version"], capture_output=True, text=True, check=True).stdout
    assert sys.prefix in said


def test_an_environment_without_pip_gets_uvs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(sys, "executable", "/opt/my tools/bin/python")
    assert install_command("a", "b") == "uv pip install --python '/opt/my tools/bin/python' a b"


@pytest.mark.parametrize("managed", [True, False])
def test_the_systems_python_is_said_to_refuse(monkeypatch, tmp_path, managed):
    if managed:
        (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert "virtual environment" not in install_command("a")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert ("virtual environment" in install_command("a")) is managed
