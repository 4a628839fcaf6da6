"""The plugins that a server on a copy loads, so that it can open the tables of its source."""

from __future__ import annotations

from typing import Any

import pytest

from snapmgr.mysql.datadir.settings import plugin_settings
from snapmgr.mysql.server.plugins import table_plugins
from snapmgr.mysql.server.program import ServerBinary


@pytest.fixture(name="binary")
def _binary(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mysqld").write_text("")
    folder = tmp_path / "lib/mysql/plugin"
    folder.mkdir(parents=True)
    for name in ("ha_archive.so", "ha_rocksdb.so", "ha_federatedx.so", "provider_lz4.so", "server_audit.so"):
        (folder / name).write_text("")
    return ServerBinary(path=str(tmp_path / "bin/mysqld"), flavor="mariadb", version="10.11.19")


def test_what_tables_need_and_is_installed_is_loaded(binary):
    settings = {"plugins": "ha_archive ha_blackhole provider_lz4"}
    assert list(table_plugins(binary, settings)) == [
        "--plugin-maturity=unknown",
        "--plugin-load-add=ha_archive.so",
        "--plugin-load-add=provider_lz4.so",
    ]
    assert "--loose-rocksdb-block-cache-size=16777216" in table_plugins(binary, {"plugins": "ha_rocksdb"})


@pytest.mark.parametrize("recorded", ["", "server_audit", "ha_federatedx", "../../evil", "ha_archive/../../x"])
def test_nothing_else_is_loaded(binary, recorded):
    assert list(table_plugins(binary, {"plugins": recorded})) == []


def test_the_users_folder_of_plugins_counts(binary, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/ha_blackhole.so").write_text("")
    found = list(table_plugins(binary, {"plugins": "ha_archive ha_blackhole"}, [f"--plugin-dir={tmp_path}/own"]))
    assert found == ["--plugin-maturity=unknown", "--plugin-load-add=ha_blackhole.so"]


def test_the_servers_libraries_are_recorded():
    class Server:
        def __init__(self, *names: str) -> None:
            self.names = names

        def rows(self, _sql: str) -> list[dict[str, str]]:
            return [{"l": name} for name in self.names]

    server: Any = Server("ha_archive.so", "ha_rocksdb.so")
    assert plugin_settings(server) == {"plugins": "ha_archive ha_rocksdb"}
    nothing: Any = Server()
    assert plugin_settings(nothing) == {}
