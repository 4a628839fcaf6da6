"""The source's binary logs as the server's own mysqlbinlog prints them: what a prefix holds, and the rest replayed."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from typing import TYPE_CHECKING

from support.load import SCHEMA, table_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from support.kinds import Kind
    from support.matrix.sites import Site
    from support.server import PrivateServer

Counters = dict[str, dict[int, int]]
"""Engine → writer → the last number that it wrote: "innodb", "aria", "myisam"."""

_HEADER_BYTES = 4
# Event types that can follow a whole transaction: STOP, ROTATE, GTID (MySQL's three kinds, MariaDB's).
_BETWEEN = frozenset({3, 4, 33, 34, 42, 162})
_TYPE_OFFSET = 4
_ENGINE_OF = {"ledger": "innodb", "journal_aria": "aria", "journal_myisam": "myisam"}
_INSERT = re.compile(rb"### INSERT INTO `%b`\.`(\w+)`\n### SET\n###   @1=(\d+)\n###   @2=(\d+)\n" % SCHEMA.encode())
_END = re.compile(rb"^#\d{6} .*? end_log_pos (\d+) ", re.MULTILINE)
_GTID = re.compile(rb"^SET @@SESSION\.GTID_NEXT= '([^']+:\d+)'|\bGTID (\d+-\d+-\d+)\b", re.MULTILINE)
_COMMIT = re.compile(rb"^COMMIT", re.MULTILINE)


class PositionError(AssertionError):
    """A recorded position is not one at which a transaction ends."""


class Prefix:
    """How far each writer came by the source's binary logs, from their beginning to a position; goes forward only."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._done: tuple[str, int] = (site.log_files()[0].name, _HEADER_BYTES)
        self._counters: Counters = defaultdict(dict)
        self.gtid = ""
        """Of the last transaction of the prefix: "0-1-17" or "UUID:17"; "" if there is none."""

    def advance(self, file: str, offset: int) -> Counters:
        """Return what the prefix up to this position holds; all before the last position is known already.

        Raises PositionError if no transaction ends there.
        """
        files = {path.name: path for path in self._site.log_files()}
        if file not in files or (file, offset) < self._done:
            raise PositionError(f"{file} {offset} is not behind {self._done} in {', '.join(files)}")
        _require_between(files[file], offset)
        for name, path in files.items():
            first = self._done[1] if name == self._done[0] else _HEADER_BYTES
            if self._done[0] <= name <= file and (name < file or first < offset):
                self._read(path, first, offset if name == file else None)
        self._done = (file, offset)
        return {engine: dict(numbers) for engine, numbers in self._counters.items()}

    def _read(self, path: Path, first: int, stop: int | None) -> None:
        said = print_events(self._site.kind, [path], first, stop)
        for table, writer, number in _INSERT.findall(said):
            if table.decode() in _ENGINE_OF:
                top = self._counters[_ENGINE_OF[table.decode()]]
                if int(number) != top.get(int(writer), 0) + 1:
                    raise PositionError(f"{path.name}: {table.decode()} of writer {int(writer)} leaps to {int(number)}")
                top[int(writer)] = int(number)
        for mysql, mariadb in _GTID.findall(said):
            self.gtid = (mysql or mariadb).decode()
        end = max((int(value) for value in _END.findall(said)), default=0)
        if stop is not None and end != stop:
            raise PositionError(f"{path.name}: the last event before {stop} ends at {end}")


def _require_between(path: Path, offset: int) -> None:
    """Raise PositionError unless the file ends at `offset` or the event there is none of a transaction's middle."""
    with path.open("rb") as file:
        file.seek(offset + _TYPE_OFFSET)
        kind = file.read(1)
        if path.stat().st_size != offset and (not kind or kind[0] not in _BETWEEN):
            raise PositionError(f"{path.name}: at {offset} there is no end of a transaction (event type {kind!r})")


def print_events(
    kind: Kind, files: Sequence[Path], first: int, stop: int | None = None, *, whole: bool = True
) -> bytes:
    """Return the events of `files` as mysqlbinlog prints them, rows decoded.

    Args:
        kind: whose program reads them.
        files: in order.
        first: where to begin in the first one.
        stop: where to end in the last one; None: at its end.
        whole: False where the last event may be cut short: what was printed before it is returned.
    """
    argv: list[str | Path] = [
        kind.program("mysqlbinlog"),
        "--no-defaults",
        "--verbose",
        "--base64-output=DECODE-ROWS",
        f"--start-position={first}",
        *([f"--stop-position={stop}"] if stop is not None else []),
        *files,
    ]
    done = subprocess.run(argv, capture_output=True, check=False)
    if whole and done.returncode != 0:
        raise RuntimeError(f"mysqlbinlog: {done.stderr.decode(errors='replace')}")
    return done.stdout


def commits_behind(kind: Kind, path: Path, offset: int) -> int:
    """Return how many whole transactions a (perhaps torn) binary log holds behind `offset`."""
    if path.stat().st_size <= offset:
        return 0
    return len(_COMMIT.findall(print_events(kind, [path], offset, whole=False)))


def replay(site: Site, copy: PrivateServer, file: str, offset: int) -> None:
    """Apply the source's binary logs from a position to their end to the server on a copy, by mysqlbinlog and mysql.

    By file and offset alone: what the copy has already would be applied twice, and fail or be seen.
    """
    files = [path for path in site.log_files() if path.name >= file]
    if files[0].stat().st_size <= offset:
        files, offset = files[1:], _HEADER_BYTES
    if not files:
        return
    read: list[str | Path] = [
        site.kind.program("mysqlbinlog"),
        "--no-defaults",
        "--disable-log-bin",
        *(["--skip-gtids"] if site.kind.flavor == "mysql" else []),
        f"--start-position={offset}",
        *files,
    ]
    write = [site.kind.program("mysql"), "--no-defaults", "--binary-mode", "--user=root", f"--socket={copy.socket}"]
    with subprocess.Popen(read, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        written = subprocess.run(write, stdin=reader.stdout, capture_output=True, check=False)
        assert reader.stdout is not None
        assert reader.stderr is not None
        # Else it would wait for ever for a client that has failed.
        reader.stdout.close()
        said = reader.stderr.read()
    if written.returncode != 0 or reader.returncode != 0:
        raise RuntimeError(f"the replay failed: {(written.stderr + said).decode(errors='replace').strip()}")


def checksums(server: PrivateServer, engines: Iterable[str]) -> dict[str, int]:
    """Return the checksum of each of the load's tables."""
    names = ", ".join(f"{SCHEMA}.{name}" for name in table_names(tuple(engines)))
    return {str(name): int(number) for name, number in server.query(f"CHECKSUM TABLE {names} EXTENDED")}
