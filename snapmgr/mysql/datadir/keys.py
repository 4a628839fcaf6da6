"""Where a running server has the keys of its encrypted data: what a server on a copy will need. Nothing secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from snapmgr.mysql.connect.client import MysqlError

if TYPE_CHECKING:
    from snapmgr.mysql.connect.client import Connection

MARIADB_KEYS = "file_key_management_"
"""What the settings of MariaDB's plugin begin with."""
COMPONENT, RING = "keyring_component", "keyring_file"
"""MySQL's component, and its file."""
BY_FILE = "FILE:"
"""So begins the name of a file with the password of MariaDB's keys; else the password itself stands there."""
_FILE_KEY = "file_key_management_filekey"


def key_settings(connection: Connection, flavor: Literal["mariadb", "mysql"]) -> dict[str, str]:
    """Return where a running server has its keys: MariaDB's file_key_management, MySQL's keyring component.

    Empty without either, or where the account may not see it. Raises MysqlError.
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
        # No right to it, or older than keyring components; whether the connection was lost the next statement says.
        return {}
    told = {str(row["k"]): str(row["v"]) for row in rows}
    return {name: told[key] for name, key in ((COMPONENT, "Component_name"), (RING, "Data_file")) if told.get(key)}
