"""The kinds of servers that tests run: the system's MariaDB, and those that ``tests/servers/unpack`` puts into a cache.

``@each_kind`` repeats a test for all of them, ``@kinds("mysql-9")`` for some; a test without either gets the system's.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from support.thoroughness import CAMPAIGN

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEWER_NAMES = {"mysqld": "mariadbd", "mysql": "mariadb", "mysqlbinlog": "mariadb-binlog"}
_COMMON_OPTIONS = (
    "--skip-networking",
    "--innodb-buffer-pool-size=64M",
    "--innodb-flush-log-at-trx-commit=1",
    "--server-id=1",
    "--log-bin=binlog",
    "--sync-binlog=1",
    "--max-connections=200",
)
# Else 8 TiB of addresses are reserved: a User Mode Linux guest has 512 GiB. Loose: older versions do not know it.
_POOL_MAX = "--loose-innodb-buffer-pool-size-max=64M"
_OPTIONS = {
    "mariadb": ("--innodb-log-file-size=16M", "--binlog-format=ROW", "--performance-schema=OFF", _POOL_MAX),
    "mysql": (
        "--innodb-redo-log-capacity=32M",
        "--gtid-mode=ON",
        "--enforce-gtid-consistency=ON",
        "--mysqlx=OFF",
        "--secure-file-priv=NULL",
    ),
}
_INSTALL_OPTIONS = {"mariadb": ("--innodb-log-file-size=16M", _POOL_MAX), "mysql": ("--innodb-redo-log-capacity=32M",)}


def cache_folder() -> Path:
    """Return the folder that ``tests/servers/unpack`` fills."""
    given = os.environ.get("SNAPMGR_TEST_SERVERS")
    if given:
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/cache/snapmgr-tests/servers")
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "snapmgr-tests" / "servers"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A server program and what belongs to it."""

    name: str
    """As in ``@pytest.mark.needs(name)``."""
    flavor: Literal["mariadb", "mysql"]
    engines: tuple[str, ...]
    """Engines beside InnoDB that `support.load` writes to."""
    unpacked: bool = True
    """In the cache folder; else installed."""

    @property
    def folder(self) -> Path:
        """Where it is unpacked: "usr" and "version" are in it."""
        return cache_folder() / self.name

    @property
    def version(self) -> str | None:
        """The version that was unpacked, "11.8.6"; None if it is an installed one or absent."""
        try:
            return (self.folder / "version").read_text().strip() if self.unpacked else None
        except FileNotFoundError:
            return None

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a private server."""
        return (*_COMMON_OPTIONS, *_OPTIONS[self.flavor])

    def program(self, name: str) -> str:
        """Return the path of one of its programs: "mysqld", "mysql", "mysqlbinlog", … or MariaDB's newer names.

        An installed MariaDB whose mariadb-binlog is not (Debian's -core packages lack it) is served by the unpacked
        one's, which reads what an older server wrote. Raises FileNotFoundError.
        """
        if self.flavor == "mariadb":
            name = _NEWER_NAMES.get(name, name)
        path = f"{self.folder}/usr/sbin:{self.folder}/usr/bin" if self.unpacked else _PATH
        found = shutil.which(name, path=path)
        if found is not None:
            return found
        if not self.unpacked:
            return KINDS["mariadb-11.8"].program(name)
        raise FileNotFoundError(f"{name} of {self.name} is not in {path}")

    def server_command(self) -> list[str]:
        """Return the server's program and the options that tell it where its own files are."""
        base = [f"--basedir={self.folder}/usr"] if self.unpacked else []
        if self.unpacked and self.flavor == "mysql":
            share = self.folder / "usr/share/mysql"
            base += [
                f"--plugin-dir={self.folder}/usr/lib/mysql/plugin",
                f"--lc-messages-dir={share}",
                f"--character-sets-dir={share}/charsets",
            ]
        return [self.program("mysqld"), "--no-defaults", *base]

    def install_command(self, datadir: Path, user: str | None) -> list[str]:
        """Return the command that initialises `datadir` for `user` (None: ourselves); root logs in without password."""
        own = [f"--datadir={datadir}", *_INSTALL_OPTIONS[self.flavor], *([f"--user={user}"] if user else [])]
        if self.flavor == "mysql":
            return [*self.server_command(), "--initialize-insecure", *own]
        base = [f"--basedir={self.folder}/usr"] if self.unpacked else []
        # By the socket, as on a Debian server.
        login = "socket" if user else "normal"
        return [
            self.program("mariadb-install-db"),
            "--no-defaults",
            *base,
            "--skip-test-db",
            f"--auth-root-authentication-method={login}",
            *own,
        ]

    def lacking(self) -> str | None:
        """Return why it cannot be used here: a sentence; None if it can. For an unpacked kind."""
        if self.version is not None:
            return None
        reason = self._left("absent") or self._left("not-covered")
        return f"{self.name} is not in {cache_folder()} (./run servers)" + (f": {reason}" if reason else "")

    def uncovered(self) -> str | None:
        """Return why it is missing if its suite is an unstable one and the fault is the archive's; None otherwise."""
        return self._left("not-covered") if self.version is None else None

    def _left(self, what: str) -> str | None:
        """Return what ``tests/servers/unpack`` left about it."""
        try:
            return (cache_folder() / f"{self.name}.{what}").read_text().strip()
        except FileNotFoundError:
            return None


SYSTEM = "mariadb-10.11"
KINDS = {
    kind.name: kind
    for kind in (
        # Debian 12's; a newer Debian has a newer one.
        Kind(name=SYSTEM, flavor="mariadb", engines=("aria", "myisam"), unpacked=False),
        Kind(name="mariadb-11.8", flavor="mariadb", engines=("aria", "myisam")),
        Kind(name="mysql-9", flavor="mysql", engines=("myisam",)),
    )
}


def kinds(*names: str) -> pytest.MarkDecorator:
    """Repeat a test for these kinds; its argument `kind` is the name, as `private_server` takes it."""
    return pytest.mark.parametrize("kind", [pytest.param(name, marks=pytest.mark.needs(name)) for name in names])


each_kind = kinds(*(name for name in KINDS if CAMPAIGN or name != "mariadb-11.8"))
"""All kinds in a campaign; without, of the two MariaDBs the one that most have."""
