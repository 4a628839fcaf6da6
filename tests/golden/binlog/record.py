"""Records small binary logs of real servers into this folder: ``PYTHONPATH=tests .venv/bin/python …/record.py``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support import binlogs
from support.kinds import KINDS
from support.server import private_server
from support.storage import work_folder

_SETUP = (
    "CREATE DATABASE t",
    "USE t",
    "CREATE TABLE i (a INT PRIMARY KEY, b TEXT) ENGINE=InnoDB",
    "CREATE TABLE m (a INT PRIMARY KEY) ENGINE=MyISAM",
    "FLUSH BINARY LOGS",
)
_TRAFFIC = (
    "INSERT INTO i VALUES (1, 'x')",
    "INSERT INTO m VALUES (1)",
    "BEGIN",
    "INSERT INTO i VALUES (2, 'x')",
    "SAVEPOINT s",
    "INSERT INTO i VALUES (3, 'x')",
    "ROLLBACK TO s",
    "COMMIT",
    "SET SESSION binlog_format = STATEMENT",
    "INSERT INTO i VALUES (4, RAND())",
    "SET SESSION binlog_format = ROW",
    "XA START 'x'",
    "INSERT INTO i VALUES (5, 'x')",
    "XA END 'x'",
    "XA PREPARE 'x'",
    "XA COMMIT 'x'",
    "DROP TABLE m",
)
_OWN = {
    "mariadb": (
        "SET gtid_domain_id = 7",
        "INSERT INTO i VALUES (6, 'x')",
        "SET gtid_domain_id = 0, server_id = 9",
        "INSERT INTO i VALUES (7, 'x')",
    ),
    "mysql": (
        "SET gtid_next = 'AUTOMATIC:tag'",
        "INSERT INTO i VALUES (6, 'x')",
        "SET gtid_next = 'AUTOMATIC', binlog_transaction_compression = ON",
        "INSERT INTO i VALUES (7, REPEAT('x', 200))",
        "SET SESSION binlog_transaction_compression = OFF",
        "INSERT INTO i VALUES (8, 'x')",
    ),
}
_FILE = "binlog.000002"


def record(kind: str) -> None:
    """Write KIND.000002, the log, and KIND.json, what the server said about it."""
    target = Path(__file__).parent / f"{kind}{Path(_FILE).suffix}"
    with (
        work_folder() as folder,
        private_server(folder / "data", ["--binlog-checksum=CRC32"], kind=kind) as server,
        server.connect() as connection,
        connection.cursor() as cursor,
    ):
        binlogs.replay(cursor, _SETUP)
        said = [binlogs.say(cursor), *binlogs.replay(cursor, (*_TRAFFIC, *_OWN[KINDS[kind].flavor]))]
        lists = {
            "positions": sorted({(line.offset, line.gtid) for line in said if line.file == _FILE}),
            "events": binlogs.events(cursor, _FILE),
        }
        shutil.copyfile(server.datadir / _FILE, target)
        texts = [f'"server": {json.dumps(server.query("SELECT VERSION()")[0][0])}']
    for name, lines in lists.items():
        texts.append(f'"{name}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in lines) + "\n ]")
    target.with_suffix(".json").write_text("{\n " + ",\n ".join(texts) + "\n}\n")


if __name__ == "__main__":
    for name in KINDS:
        record(name)
