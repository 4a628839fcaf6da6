"""Which server program starts on a copy: of the flavor that wrote the data, and never an older one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from snapmgr.command import CommandRunner, find_program
from snapmgr.errors import CommandError, LackingError

Flavor = Literal["mariadb", "mysql"]

_NAMES: dict[str, tuple[str, ...]] = {"mariadb": ("mariadbd", "mysqld"), "mysql": ("mysqld",)}
_VERSION = re.compile(r"\bVer (?P<version>(?P<major>\d+)\.(?P<minor>\d+)\.(?P<patch>\d+)\S*)")


@dataclass(frozen=True, kw_only=True)
class ServerBinary:
    """A server program."""

    path: str
    flavor: Literal["mariadb", "mysql"]
    version: str
    """As printed: "10.11.6-MariaDB-0+deb12u1", "8.4.3"."""

    @property
    def number(self) -> tuple[int, ...]:
        """The version's first three numbers."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])


def find_server(flavor: Literal["mariadb", "mysql"], explicit: str | None = None) -> ServerBinary:
    """Return the server program of `flavor`: the `explicit` path, or the one installed.

    Raises LackingError if there is none, or only one of the other flavor: that says nothing about any snapshot.
    """
    package = "mariadb-server-core" if flavor == "mariadb" else "mysql-server-core"
    seen: list[str] = []
    for name in (explicit,) if explicit else _NAMES[flavor]:
        try:
            path = name if "/" in name else find_program(name)
            said = CommandRunner().run([path, "--no-defaults", "--version"]).stdout
        except (LackingError, CommandError) as error:
            seen.append(error.message)
            continue
        match = _VERSION.search(said)
        actual: Literal["mariadb", "mysql"] = "mariadb" if "mariadb" in said.lower() else "mysql"
        if match and actual == flavor:
            return ServerBinary(path=path, flavor=flavor, version=match["version"])
        seen.append(f"{path} is no {flavor} server: {said.strip()[:200] or 'it prints no version'}")
    raise LackingError(
        f"no {flavor} server program to start on a copy ({'; '.join(seen)})",
        hint=f"apt-get install {package} (it starts no service), or name the program in the configuration",
    )
