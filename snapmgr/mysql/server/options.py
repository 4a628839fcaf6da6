"""Builds the options of a throwaway server: the source's settings that its files need, and no background work."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from snapmgr.mysql.datadir.settings import PATH_SETTINGS, PLUGINS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapmgr.mysql.datadir.copy import IsolatedCopy
    from snapmgr.mysql.server.program import ServerBinary

_MIB = 1024 * 1024
# Memory besides the buffer pool, with the options below: measured 160 MiB on MySQL 9.7, 42 on MariaDB 11.8.
_FIXED_BYTES = {"mariadb": 48 * _MIB, "mysql": 160 * _MIB}
_SMALLEST_POOL = 32 * _MIB
# MySQL rounds the pool up to whole chunks, by default of 128 MiB.
_CHUNK = 8 * _MIB
_LARGE_POOL = 1024 * _MIB
# Other settings are "loose": a version that does not know one does not need it.
_STRICT = ("innodb_page_size", "innodb_data_file_path", "lower_case_table_names")


def throwaway_options(
    binary: ServerBinary,
    copy: IsolatedCopy,
    *,
    memory_bytes: int,
    run_dir: str,
    socket: str,
    uid: int,
) -> list[str]:
    """Return the options of a throwaway server. Pure except for the random server id and the program's folders."""
    replica = "replica" if binary.flavor == "mysql" and binary.number >= (8, 0, 26) else "slave"
    pool = max(memory_bytes - _FIXED_BYTES[binary.flavor], _SMALLEST_POOL) // _MIB
    options = [
        "--no-defaults",
        *program_folders(binary),
        f"--datadir={copy.datadir}",
        f"--socket={socket}",
        f"--pid-file={run_dir}/pid",
        f"--tmpdir={os.path.join(run_dir, 'tmp')}",
        f"--secure-file-priv={os.path.join(run_dir, 'tmp')}",
        "--skip-networking",
        # The socket is private; CHECK TABLE checks the accounts.
        "--skip-grant-tables",
        f"--skip-{replica}-start",
        f"--relay-log={run_dir}/relay",
        "--event-scheduler=DISABLED",
        f"--server-id={2**31 + secrets.randbelow(2**31 - 1)}",
        "--performance-schema=OFF",
        "--max-connections=10",
        "--key-buffer-size=8M",
        f"--innodb-buffer-pool-size={pool}M",
        "--innodb-buffer-pool-load-at-startup=OFF",
        "--innodb-buffer-pool-dump-at-shutdown=OFF",
        "--innodb-log-buffer-size=8M",
        # The copy is thrown away: it need not be durable, and damage must be found rather than repaired.
        "--innodb-flush-log-at-trx-commit=0",
        "--sync-binlog=0",
        "--myisam-recover-options=OFF",
        # The last log lines explain a crash well enough, and symbols may take half a minute.
        "--skip-stack-trace",
        *(_of_mariadb(run_dir, pool) if binary.flavor == "mariadb" else _of_mysql(pool * _MIB)),
    ]
    if uid == 0:
        # The source's datadir is root's, so its server ran as root: a server requires this option for that.
        options.append("--user=root")
    for name, value in copy.settings.items():
        if name not in (*PATH_SETTINGS, PLUGINS) and not name.startswith(("file_key_management_", "keyring_")):
            options.append(f"--{'' if name in _STRICT else 'loose-'}{name.replace('_', '-')}={value}")
    options += [f"--{name.replace('_', '-')}={path}" for name, path in copy.paths.items()]
    return [*options, *copy.log_bin_options]


def program_folders(binary: ServerBinary) -> Iterator[str]:
    """Yield the options for a server's own files if they are beside its program; other servers find theirs.

    Otherwise a program that was unpacked into its own folder would use the files of the installed server, or none.
    """
    root = _root(binary)
    series = ".".join(str(part) for part in binary.number[:2])
    names = ("mariadb", "mysql") if binary.flavor == "mariadb" else ("mysql", f"mysql-{series}")
    shares = [os.path.join(root, "share", name) for name in (*names, "")]
    messages = next((path for path in shares if os.path.isfile(os.path.join(path, "english/errmsg.sys"))), None)
    charsets = next((path for path in shares if os.path.isfile(os.path.join(path, "charsets/Index.xml"))), None)
    if messages or charsets:
        yield f"--basedir={root}"
    if messages:
        yield f"--lc-messages-dir={messages.rstrip('/')}"
    if charsets:
        yield f"--character-sets-dir={os.path.join(charsets, 'charsets')}"
    if plugins := plugin_folder(binary):
        yield f"--plugin-dir={plugins}"


def plugin_folder(binary: ServerBinary, options: Sequence[str] = ()) -> str | None:
    """Return the plugin folder that the user's options name, else that beside a server's program; None without one."""
    given = [one.partition("=")[2] for one in options if one.startswith(("--plugin-dir=", "--plugin_dir="))]
    if given:
        return given[-1]
    root = _root(binary)
    names = ("mariadb", "mysql", "") if binary.flavor == "mariadb" else ("mysql", "")
    folders = (os.path.join(root, lib, name, "plugin") for lib in ("lib", "lib64") for name in names)
    return next((path for path in folders if os.path.isdir(path)), None)


def _root(binary: ServerBinary) -> str:
    return os.path.dirname(os.path.dirname(os.path.realpath(binary.path)))


def _of_mariadb(run_dir: str, pool_mib: int) -> Iterator[str]:
    # Otherwise newer minor versions reserve 8 TiB of addresses, and do not start with fewer (User Mode Linux: 512 GiB).
    # A larger pool in a later option raises it.
    yield f"--loose-innodb-buffer-pool-size-max={pool_mib}M"
    yield "--aria-recover-options=OFF"
    yield "--aria-pagecache-buffer-size=16M"
    yield "--expire-logs-days=0"
    # Otherwise a key rotation of the source would continue here.
    yield "--innodb-encryption-threads=0"
    yield f"--master-info-file={run_dir}/master.info"
    yield f"--relay-log-info-file={run_dir}/relay-log.info"


def _of_mysql(pool_bytes: int) -> Iterator[str]:
    yield "--loose-mysqlx=OFF"
    yield "--loose-persisted-globals-load=OFF"
    yield "--loose-binlog-expire-logs-seconds=0"
    yield "--loose-expire-logs-days=0"
    # Recovery reports by notes, which are off by default.
    yield "--loose-log-error-verbosity=3"
    # Make no certificates in the copy.
    yield "--loose-auto-generate-certs=OFF"
    yield "--loose-sha256-password-auto-generate-rsa-keys=OFF"
    yield "--loose-caching-sha2-password-auto-generate-rsa-keys=OFF"
    if pool_bytes < _LARGE_POOL:
        yield f"--loose-innodb-buffer-pool-chunk-size={_CHUNK}"
    yield "--loose-innodb-buffer-pool-instances=1"
    yield "--table-open-cache=400"
    yield "--table-definition-cache=400"
    yield f"--loose-temptable-max-ram={16 * _MIB}"
    yield "--loose-temptable-max-mmap=0"
    yield "--loose-innodb-ddl-buffer-size=1M"
    yield "--loose-binlog-transaction-dependency-history-size=1"
