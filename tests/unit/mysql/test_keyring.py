"""The key options of a server on a copy, and the reasons that it reports for missing keys."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from snapmgr.mysql.datadir.copy import IsolatedCopy
from snapmgr.mysql.datadir.settings import key_settings
from snapmgr.mysql.server.keyring import provide_keys
from snapmgr.mysql.server.program import ServerBinary

ME = (os.getuid(), os.getgid())


def program(tmp_path, flavor, plugins=()):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mysqld").write_text("")
    (tmp_path / "lib/plugin").mkdir(parents=True)
    for name in plugins:
        (tmp_path / "lib/plugin" / name).write_text("")
    return ServerBinary(path=str(tmp_path / "bin/mysqld"), flavor=flavor, version="9.7.4")


def copy(tmp_path, settings, *, covers=()):
    return IsolatedCopy(
        datadir=str(tmp_path), home=str(tmp_path), settings=settings, paths={}, log_bin_options=(), covers=covers
    )


def provide(tmp_path, binary, settings, originals=None, options=()):
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    return provide_keys(binary, copy(tmp_path, settings), originals or {}, run_dir=str(run), owner=ME, options=options)


def test_mariadb_gets_its_plugin_and_the_files_by_their_paths(tmp_path):
    binary = program(tmp_path, "mariadb", ["file_key_management.so"])
    (tmp_path / "keys").write_text("1;00")
    (tmp_path / "pass").write_text("p")
    settings = {
        "file_key_management_filename": str(tmp_path / "keys"),
        "file_key_management_filekey": f"FILE:{tmp_path}/pass",
        "file_key_management_encryption_algorithm": "aes_cbc",
    }
    found = provide(tmp_path, binary, settings)
    assert found.missing is None
    assert found.options == (
        "--plugin-load-add=file_key_management",
        f"--file-key-management-filename={tmp_path}/keys",
        f"--file-key-management-filekey=FILE:{tmp_path}/pass",
        "--file-key-management-encryption-algorithm=aes_cbc",
    )
    # A key file inside the source's folders is the copy's own.
    within = settings | {"file_key_management_filename": "/live/keys"}
    found = provide(tmp_path, binary, within, {"/live": str(tmp_path)})
    assert f"--file-key-management-filename={tmp_path}/keys" in found.options
    assert provide(tmp_path, binary, settings, options=["--file-key-management-filename=/mine"]).options == ()


@pytest.mark.parametrize(
    ("settings", "plugins", "missing"),
    [
        ({}, ["file_key_management.so"], "did not use the plugin"),
        (
            {"file_key_management_filename": "/nowhere/keys"},
            ["file_key_management.so"],
            "cannot read /nowhere/keys here",
        ),
        ({"file_key_management_filename": "/nowhere/keys"}, [], "package mariadb-server"),
    ],
)
def test_what_mariadb_lacks_is_said(tmp_path, settings, plugins, missing):
    found = provide(tmp_path, program(tmp_path, "mariadb", plugins), settings)
    assert found.options == ()
    assert missing in (found.missing or "")


def test_mysqls_component_gets_a_copy_of_the_keyring(tmp_path):
    binary = program(tmp_path, "mysql", ["component_keyring_file.so", "other.so", "component_keyring_file.cnf"])
    ring = tmp_path / "ring"
    ring.write_text("{}")
    settings = {"keyring_component": "component_keyring_file", "keyring_file": str(ring)}
    assert "mysqld.my does not load" in (provide(tmp_path, binary, settings).missing or "")
    (tmp_path / "bin/mysqld.my").write_text('{"read_local_manifest": true}')
    (tmp_path / "mysqld.my").write_text('{"components": "file://component_keyring_file"}')
    found = provide(tmp_path, binary, settings)
    run = tmp_path / "run"
    assert found.plugin_dir == f"{run}/plugins"
    assert sorted(os.listdir(run / "plugins")) == [
        "component_keyring_file.cnf",
        "component_keyring_file.so",
        "other.so",
    ]
    config = json.loads((run / "plugins/component_keyring_file.cnf").read_text())
    assert config == {"path": f"{run}/keyring", "read_only": False}
    assert (run / "keyring").read_text() == "{}"
    assert (run / "keyring").stat().st_mode & 0o777 == 0o600


def test_other_components_and_a_keyring_that_is_gone_are_said(tmp_path):
    binary = program(tmp_path, "mysql", ["component_keyring_file.so"])
    (tmp_path / "bin/mysqld.my").write_text('{"components": "file://component_keyring_file"}')
    gone = {"keyring_component": "component_keyring_file", "keyring_file": "/nowhere/ring"}
    assert "cannot read the keyring /nowhere/ring here" in (provide(tmp_path, binary, gone).missing or "")
    other = {"keyring_component": "component_keyring_kms"}
    assert "component_keyring_kms" in (provide(tmp_path, binary, other).missing or "")


class Answers:
    """A connection that answers every statement alike."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self._rows = rows

    def rows(self, _sql: str) -> list[dict[str, str]]:
        return self._rows


def test_a_password_in_the_settings_is_not_recorded():
    def asked(value: str) -> dict[str, str]:
        rows = [
            {"Variable_name": "file_key_management_filekey", "Value": value},
            {"Variable_name": "file_key_management_filename", "Value": "/etc/keys"},
        ]
        connection: Any = Answers(rows)
        return key_settings(connection, "mariadb")

    assert asked("hunter2") == {"file_key_management_filename": "/etc/keys"}
    assert asked("FILE:/etc/pass")["file_key_management_filekey"] == "FILE:/etc/pass"
    assert asked("") == {"file_key_management_filename": "/etc/keys"}
