"""Collects the settings of a running server that a server on a copy will need; they never hold a secret."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from snapmgr.mysql.connect.client import MysqlError

if TYPE_CHECKING:
    from snapmgr.mysql.connect.client import Connection

# Without these, or with other values, a server on a copy refuses the files or reads them differently.
SETTINGS = (
    "innodb_page_size",
    "innodb_data_file_path",
    "innodb_undo_tablespaces",
    # Without these the server would begin by resizing its redo log.
    "innodb_log_file_size",
    "innodb_log_files_in_group",
    "innodb_redo_log_capacity",
    "innodb_checksum_algorithm",
    "lower_case_table_names",
    "aria_block_size",
    "character_set_server",
    "collation_server",
    "gtid_mode",
    "enforce_gtid_consistency",
    "innodb_directories",
)
"""Variables of a server; those that its version does not have are left out."""
FOLDER_SETTINGS = (
    "innodb_data_home_dir",
    "innodb_log_group_home_dir",
    "innodb_undo_directory",
    "innodb_doublewrite_dir",
    "aria_log_dir_path",
)
PATH_SETTINGS = (
    *FOLDER_SETTINGS,
    "log_bin_basename",
    "log_bin_index",
    "relay_log_basename",
    "relay_log_index",
    "relay_log_info_file",
)
"""Further variables, which are paths: kept relative to the datadir, so that they also hold in a copy of the volume."""
MARIADB_KEYS = "file_key_management_"
"""Prefix of the settings of MariaDB's plugin."""
COMPONENT, RING = "keyring_component", "keyring_file"
"""MySQL's component, and its file."""
PLUGINS = "plugins"
"""The plugin libraries that the server had loaded, without ".so" and separated by spaces."""
BY_FILE = "FILE:"
"""Prefix of the name of a file with the password of MariaDB's keys; without it the value is the password itself."""
_FILE_KEY = "file_key_management_filekey"


def source_settings(values: dict[str, str], datadir: str) -> dict[str, str]:
    """Given variables of a server and its datadir, return those of SETTINGS and PATH_SETTINGS that are set."""
    settings = {name: values[name] for name in SETTINGS if values.get(name)}
    for name in PATH_SETTINGS:
        if values.get(name):
            # Resolve the folder but not the file's own name: log-bin was set to that.
            path = os.path.join(datadir, values[name])
            folder, base = (path, "") if name in FOLDER_SETTINGS else os.path.split(path)
            settings[name] = os.path.normpath(os.path.join(os.path.relpath(os.path.realpath(folder), datadir), base))
    return settings


def plugin_settings(connection: Connection) -> dict[str, str]:
    """Return the plugin libraries of a running server; empty without any. Raises MysqlError."""
    rows = connection.rows(
        "SELECT DISTINCT PLUGIN_LIBRARY AS l FROM information_schema.PLUGINS WHERE PLUGIN_LIBRARY IS NOT NULL "
        "AND PLUGIN_STATUS = 'ACTIVE' ORDER BY l"
    )
    found = " ".join(str(row["l"]).removesuffix(".so") for row in rows)
    return {PLUGINS: found} if found else {}


def key_settings(connection: Connection, flavor: Literal["mariadb", "mysql"]) -> dict[str, str]:
    """Return the settings of a running server's keys: MariaDB's file_key_management, MySQL's keyring component.

    Empty without either, or if the account may not see it. Raises MysqlError.
    """
    if flavor == "mariadb":
        rows = connection.rows(r"SHOW GLOBAL VARIABLES LIKE 'file\_key\_management\_%'")
        found = {str(row["Variable_name"]).lower(): str(row["Value"]) for row in rows if row["Value"]}
        if not found.get(_FILE_KEY, BY_FILE).startswith(BY_FILE):
            del found[_FILE_KEY]
        return found
    try:
        rows = connection.rows(
            "SELECT STATUS_KEY AS k, STATUS_VALUE AS v FROM performance_schema.keyring_component_status"
        )
    except MysqlError:
        # No right to it, or older than keyring components. If the connection was lost, the next statement fails.
        return {}
    told = {str(row["k"]): str(row["v"]) for row in rows}
    return {name: told[key] for name, key in ((COMPONENT, "Component_name"), (RING, "Data_file")) if told.get(key)}
