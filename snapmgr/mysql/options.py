"""The options of a throwaway server: those of the source that its files need, and nothing that would do any work."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from snapmgr.mysql.layout import PATH_SETTINGS

if TYPE_CHECKING:
    from snapmgr.mysql.copy import Copy
    from snapmgr.mysql.program import ServerBinary

_MIB = 1024 * 1024
_FIXED_BUFFERS = 48 * _MIB
_SMALLEST_POOL = 32 * _MIB


def server_options(
    binary: ServerBinary,
    copy: Copy,
    *,
    memory_bytes: int,
    run_dir: str,
    socket: str,
    uid: int,
) -> list[str]:
    """Return the options of a throwaway server: pure but for the random server id."""
    mariadb = binary.flavor == "mariadb"
    replica = "slave" if mariadb or binary.number < (8, 0, 26) else "replica"
    options = [
        "--no-defaults",
        f"--datadir={copy.datadir}",
        f"--socket={socket}",
        f"--pid-file={run_dir}/pid",
        f"--tmpdir={os.path.join(run_dir, 'tmp')}",
        f"--secure-file-priv={os.path.join(run_dir, 'tmp')}",
        "--skip-networking",
        # The socket is private; and whether the accounts are intact is CHECK TABLE's question.
        "--skip-grant-tables",
        f"--skip-{replica}-start",
        f"--relay-log={run_dir}/relay",
        "--event-scheduler=DISABLED",
        f"--server-id={2**31 + secrets.randbelow(2**31 - 1)}",
        "--performance-schema=OFF",
        "--max-connections=10",
        "--key-buffer-size=8M",
        f"--innodb-buffer-pool-size={max(memory_bytes - _FIXED_BUFFERS, _SMALLEST_POOL) // _MIB}M",
        "--innodb-buffer-pool-load-at-startup=OFF",
        "--innodb-buffer-pool-dump-at-shutdown=OFF",
        "--innodb-log-buffer-size=8M",
        # The copy is thrown away: nothing needs to be durable, everything needs to be found broken rather than mended.
        "--innodb-flush-log-at-trx-commit=0",
        "--sync-binlog=0",
        "--myisam-recover-options=OFF",
    ]
    if mariadb:
        options += [
            "--aria-recover-options=OFF",
            "--aria-pagecache-buffer-size=16M",
            "--expire-logs-days=0",
            f"--master-info-file={run_dir}/master.info",
            f"--relay-log-info-file={run_dir}/relay-log.info",
        ]
    else:
        options += [
            "--loose-mysqlx=OFF",
            "--loose-persisted-globals-load=OFF",
            "--loose-binlog-expire-logs-seconds=0",
            "--loose-expire-logs-days=0",
        ]
    if uid == 0:
        # The source's datadir is root's, so its server ran as root: that takes saying so.
        options.append("--user=root")
    # Where the other version does not know a setting any more (loose), it does not need it either.
    strict = ("innodb_page_size", "innodb_data_file_path", "lower_case_table_names")
    for name, value in copy.settings.items():
        if name not in PATH_SETTINGS:
            options.append(f"--{'' if name in strict else 'loose-'}{name.replace('_', '-')}={value}")
    options += [f"--{name.replace('_', '-')}={path}" for name, path in copy.paths.items()]
    return [*options, *copy.log_bin_options]
