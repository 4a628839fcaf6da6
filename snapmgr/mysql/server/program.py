"""Finds the server program to start on a copy: of the flavor that wrote the data, and never an older one."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import CommandError, MissingRequirementError
from snapmgr.mysql.connect.identity import program_of, server_processes
from snapmgr.mysql.datadir.origin import Flavor, Origin, read_origin, version_number
from snapmgr.system.command import CommandRunner, find_program
from snapmgr.system.trust import changeable, exchangeable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from snapmgr.catalog.manifest import ServerRecord

_NAMES: dict[str, tuple[str, ...]] = {"mariadb": ("mariadbd", "mysqld"), "mysql": ("mysqld",)}
# Outside PATH: Red Hat's package, and the folder in MySQL's instructions for its tarball.
_FOLDERS = ("/usr/libexec", "/usr/local/mysql/bin", "/usr/local/mariadb/bin")
_VERSION = re.compile(r"\bVer (?P<version>\d+\.\d+\.\d+\S*)")


class ServerBinary(Struct, frozen=True, kw_only=True):
    """A server program."""

    path: str
    flavor: Flavor
    version: str
    """As printed: "10.11.6-MariaDB-0+deb12u1", "8.4.3"."""

    @property
    def number(self) -> tuple[int, ...]:
        """The version's first three numbers."""
        return version_number(self.version)

    def is_upgrade(self, wrote: str) -> bool:
        """Return whether this program changes the format of data that version `wrote` left."""
        depth = 2 if self.flavor == "mariadb" else 3
        return bool(version_number(wrote)) and self.number[:depth] > version_number(wrote)[:depth]


def find_server(
    flavor: Flavor, explicit: str | None = None, *, wrote: str | None = None, ran: str | None = None
) -> ServerBinary:
    """Return the server program to start on data of `flavor`.

    Args:
        flavor: of the server that wrote the data.
        explicit: the only allowed program; without it we consider all installed programs, and those of running servers.
        wrote: version of the server that wrote the data. The same version is preferred, then one of its series, then
            the nearest newer one; an older one is refused.
        ran: path of the source's program; considered too.

    Raises MissingRequirementError without any program, or with only one of the other flavor or an older one: that does
    not judge the snapshot.
    """
    found, seen = _look(flavor, (explicit,) if explicit else _candidates(flavor, ran))
    if not found:
        raise MissingRequirementError(
            f"no {flavor} server program to start on a copy ({'; '.join(seen)})",
            hint=f"apt-get install {flavor}-server-core (it starts no service), or name the program in the "
            "configuration (verify.server)",
        )
    if wrote is None or not version_number(wrote):
        return found[0]
    chosen = choose_server(found, wrote)
    if chosen is None:
        enough = ".".join(str(part) for part in version_number(wrote)[: 2 if flavor == "mariadb" else 3])
        programs = ", ".join(f"{one.path} ({one.version})" for one in found)
        raise MissingRequirementError(
            f"the data were written by {flavor} {wrote}, which an older server must not open; found: {programs}",
            hint=f"install {flavor} {enough} or a later one, or name its program in the configuration (verify.server)",
        )
    return chosen


def choose_server(found: Sequence[ServerBinary], wrote: str) -> ServerBinary | None:
    """Return which of the programs, all of one flavor, opens data that version `wrote` left; None if none may.

    Pure. MariaDB's formats are the same throughout a series (10.11); MySQL refuses data of any later version.
    """
    number = version_number(wrote)
    fitting = [
        one for one in found if one.number >= number or (one.flavor == "mariadb" and one.number[:2] == number[:2])
    ]
    return min(
        fitting,
        key=lambda one: (one.number != number, one.number[:2] != number[:2], one.number < number, one.number),
        default=None,
    )


def _look(flavor: Flavor, candidates: Iterable[str]) -> tuple[list[ServerBinary], list[str]]:
    """Return the programs of `flavor` among the candidates, each once, and the reasons against the others."""
    found: list[ServerBinary] = []
    seen: list[str] = []
    files: set[str] = set()
    for name in candidates:
        try:
            path = name if "/" in name else find_program(name)
            file = os.path.realpath(path)
            if file in files:
                continue
            files.add(file)
            said = CommandRunner().run([path, "--no-defaults", "--version"]).stdout
        except (MissingRequirementError, CommandError) as error:
            seen.append(error.message)
            continue
        match = _VERSION.search(said)
        # Go by its output: "mysqld" may be a symlink to MariaDB's.
        actual: Flavor = "mariadb" if "mariadb" in said.lower() else "mysql"
        if match and actual == flavor:
            found.append(ServerBinary(path=path, flavor=flavor, version=match["version"]))
        else:
            seen.append(f"{path} is not a {flavor} server: {said.strip()[:200] or 'it prints no version'}")
    return found, seen


def server_for(recorded: ServerRecord | None, datadir: str | os.PathLike[str], explicit: str | None) -> ServerBinary:
    """Return the program to start on a copy at `datadir`; `recorded`: its server, None if we could not ask it.

    Raises MissingRequirementError as `find_server`.
    """
    origin = read_origin(datadir)
    if recorded is None:
        return find_server(origin.flavor, explicit, wrote=origin.version)
    return find_server(recorded.flavor, explicit, wrote=wrote_last(recorded, origin), ran=recorded.program)


def wrote_last(recorded: ServerRecord, origin: Origin) -> str:
    """Return the version of the server that last wrote the data; "" if unknown. Pure.

    An option can make a server print any version (--version=8.0.30); MySQL's data have the true one.
    """
    if origin.flavor == recorded.flavor == "mysql" and origin.version:
        return origin.version
    return recorded.version


def _candidates(flavor: Flavor, ran: str | None) -> Iterator[str]:
    yield from _NAMES[flavor]
    for folder in _FOLDERS:
        for name in _NAMES[flavor]:
            if os.path.isfile(path := os.path.join(folder, name)):
                yield path
    # Paths from other sources: as root we run only programs that only root can change.
    for path in (*([ran] if ran else []), *running_programs()):
        with suppress(OSError):
            if changeable(os.stat(path)) is None and exchangeable(Path(path)) is None:
                yield path


def running_programs(proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield the program files of the running database servers."""
    for process in server_processes(proc):
        if path := program_of(int(process.name), proc):
            yield path
