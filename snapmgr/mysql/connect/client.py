"""Connects to a server over its unix socket with PyMySQL; its errors name a remedy and never contain a secret.

A connection is never re-established: its lock would be lost without anybody noticing.
"""

from __future__ import annotations

import os
import pwd
import socket as sockets
import struct
import sys
from _thread import get_ident
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from snapmgr.contract.errors import ConfigError, MissingRequirementError, NotQuiescedError, SnapmgrError
from snapmgr.mysql.connect.statements import first_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

_DEFAULT_SOCKETS = ("/run/mysqld/mysqld.sock", "/var/lib/mysql/mysql.sock")
_SERVER_TEXT_SHOWN = 400
# Error numbers when the connection is gone: client 2006, 2013, 2055; server shutdown 1053, network
# 1152 to 1161, killed 1927 (MariaDB) and 3169, ended for idleness 4031 (MySQL 8.0.24 on).
_LOST = frozenset({2006, 2013, 2055, 1053, 1152, 1158, 1159, 1160, 1161, 1927, 3169, 4031})
_UNKNOWN_PLUGIN = 2059
_DENIED = frozenset({1044, 1045, 1698, _UNKNOWN_PLUGIN, 4151})
_MISSING_PRIVILEGE = frozenset({1142, 1143, 1227, 1370, 1410})
_SYNTAX_ERROR = 1064
# PyMySQL does without them where they are missing. Loading them takes more than half of its time, and on a unix socket
# it uses neither: no TLS, and no RSA for a password that does not leave the machine.
_UNUSED = ("cryptography", "ssl")
# Overrides global defaults that would truncate an answer, end its query, or parse our statements differently.
_PLAIN_SESSION = (
    "SET SESSION sql_mode = '', sql_select_limit = 18446744073709551615, sql_big_selects = 1"
    "/*!80000 , max_execution_time = 0 *//*M!100101 , max_statement_time = 0 */"
)


class MysqlError(NotQuiescedError):
    """A statement failed, or the server refused it; `errno` is its error number (0: not from the server)."""

    def __init__(self, message: str, *, errno: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


class ConnectionLostError(MysqlError):
    """The connection is gone, and with it every lock that it held."""


class Credentials(Struct, frozen=True, kw_only=True):
    """The login, without the password: that stays in the file until the moment of use."""

    socket: str | None = None
    defaults_file: str | None = None
    user: str | None = None


class _Secret(bytes):
    """A password that does not show itself in a traceback with local variables."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    __str__ = __repr__


class _Login(Struct, frozen=True, kw_only=True):
    socket: str
    user: str
    password: _Secret


class Connection:
    """One session with autocommit and utf8mb4. As a context manager it closes, or drops after an exception."""

    def __init__(self, raw: Any, socket: str) -> None:  # noqa: ANN401 - PyMySQL has no types
        """Wrap an open PyMySQL connection; use `connect` instead."""
        self._raw = raw
        self._dropped = False
        self.socket = socket
        self.connection_id: int = raw.thread_id()
        """From the handshake (32 bits of CONNECTION_ID()), so it needs no query."""
        # MariaDB prefixes its version for the sake of old replicas.
        self.server_version: str = raw.get_server_info().removeprefix("5.5.5-")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close properly, or drop immediately after an exception."""
        if kind is None:
            self.close()
        else:
            self.drop()

    def execute(self, sql: str, args: Sequence[object] = ()) -> None:
        """Run one statement and forget its result. Raises MysqlError, ConnectionLostError."""
        self._run(sql, args)

    def rows(self, sql: str, args: Sequence[object] = ()) -> list[dict[str, object]]:
        """Run one statement and return its rows, by column name. Raises MysqlError, ConnectionLostError."""
        return self._run(sql, args)

    def value(self, sql: str, args: Sequence[object] = ()) -> object:
        """Return the first column of the first row, None without a row. Raises MysqlError, ConnectionLostError."""
        rows = self._run(sql, args)
        return next(iter(rows[0].values())) if rows else None

    def variables(self, *names: str) -> dict[str, str]:
        """Return global variables by lower-case name, without those that this server does not know."""
        return self._show("VARIABLES", names)

    def status(self, *names: str) -> dict[str, str]:
        """Return global status variables by lower-case name, without those that this server does not know."""
        return self._show("STATUS", names)

    def _show(self, what: str, names: Sequence[str]) -> dict[str, str]:
        rows = self._run(f"SHOW GLOBAL {what} WHERE Variable_name IN %s", (tuple(names),)) if names else []
        return {str(row["Variable_name"]).lower(): _text(row["Value"]) for row in rows}

    def peer_pid(self) -> int:
        """Return the process that called listen() on the socket (SO_PEERCRED, unix(7)); 0 if it is not visible.

        Raises ConnectionLostError.
        """
        packed = self._socket().getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", packed)[0]
        return pid

    def set_read_timeout(self, seconds: float) -> None:
        """From now on wait at most `seconds` for each piece of an answer; after that the connection counts as lost."""
        if seconds <= 0:
            msg = "a read timeout must be more than 0 s"
            raise ValueError(msg)
        # PyMySQL compares this with the socket's timeout before each read, and has no public setter.
        self._raw._read_timeout = seconds  # noqa: SLF001

    def close(self) -> None:
        """Send COM_QUIT and close; never raises, and may be called again."""
        if not self._dropped:
            self._dropped = True
            with suppress(Exception):
                self._raw.close()

    def drop(self) -> None:
        """Cut the connection without COM_QUIT; never blocks, never raises, and may be called from a thread."""
        self._dropped = True
        sock = self._raw._sock  # noqa: SLF001
        if sock is not None:
            # Before close(): this wakes a reading thread, and close() would wait for that thread's lock on the buffer.
            with suppress(OSError):
                sock.shutdown(sockets.SHUT_RDWR)
        with suppress(Exception):
            self._raw._force_close()  # noqa: SLF001

    def _socket(self) -> sockets.socket:
        sock: sockets.socket | None = self._raw._sock  # noqa: SLF001
        if sock is None:
            raise ConnectionLostError("the connection to the database server is closed", errno=2006)
        return sock

    def _run(self, sql: str, args: Sequence[object]) -> list[dict[str, object]]:
        from pymysql import MySQLError  # noqa: PLC0415 - slow; `connect` has loaded it

        try:
            with self._raw.cursor() as cursor:
                cursor.execute(sql, tuple(args) or None)
                return list(cursor.fetchall())
        except MySQLError as error:
            failure = _statement_failure(sql, error)
        except BaseException as error:
            # An answer may be half read (an interruption, undecodable text): the connection is no longer usable.
            dropped_meanwhile = self._dropped and isinstance(error, AttributeError | OSError | ValueError)
            self.drop()
            if not dropped_meanwhile:
                raise
            failure = _statement_failure(sql, error)
        # Outside the handler, so that no chained exception carries PyMySQL's frames.
        if isinstance(failure, ConnectionLostError):
            self.drop()
        raise failure


def connect(credentials: Credentials, *, timeout_s: float = 5.0) -> Connection:
    """Log in over the unix socket and return the connection; `timeout_s` bounds each step, and later reads too.

    Uses the given socket, or the defaults-file's, or that of Debian's packages. Without a user in either place it logs
    in as the user we run as, as unix_socket authentication requires.

    Raises ConfigError for a defaults-file that is malformed or readable by others, or for a TCP host;
    MissingRequirementError if PyMySQL is missing; MysqlError if the server is not reachable or refuses the login.
    """
    login = _login(credentials)
    opened = _open(login, timeout_s)
    if isinstance(opened, MysqlError):
        raise opened
    return Connection(opened, login.socket)


def login_socket(credentials: Credentials) -> str:
    """Return the path of the socket that `connect` would use. Raises ConfigError as `connect`."""
    return _login(credentials).socket


def login_options(credentials: Credentials) -> bytes:
    """Return the content of an option file with which a client program logs in as `connect` does, password included.

    Raises ConfigError as `connect`.
    """
    from snapmgr.mysql.connect.optionfile import quoted  # noqa: PLC0415 - only for the servers' own tools

    login = _login(credentials)
    values = {b"socket": os.fsencode(login.socket), b"user": login.user.encode(), b"password": bytes(login.password)}
    lines = (name + b" = " + quoted(value) for name, value in values.items() if value)
    return _Secret(b"[client]\n" + b"\n".join(lines) + b"\n")


def quote(identifier: str) -> str:
    """Return an identifier in backticks, with its own backticks doubled."""
    return "`" + identifier.replace("`", "``") + "`"


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _login(credentials: Credentials) -> _Login:
    options: dict[str, str] = {}
    if credentials.defaults_file:
        from snapmgr.mysql.connect.optionfile import read_client_options  # noqa: PLC0415 - only with such a file

        options = read_client_options(credentials.defaults_file)
    socket = credentials.socket or options.get("socket")
    host = options.get("host", "")
    tcp = options.get("protocol", "").lower() == "tcp" or host not in ("", "localhost")
    if tcp and not credentials.socket:
        raise ConfigError(
            f"{credentials.defaults_file} asks for a TCP connection" + (f" to {host}" if host else ""),
            hint="snapmgr must run on the server's host and use its unix socket, which alone proves whose data it is: "
            "set socket = /path/of/mysqld.sock and remove host and protocol",
        )
    if not socket:
        socket = next((path for path in _DEFAULT_SOCKETS if os.path.exists(path)), _DEFAULT_SOCKETS[0])
    user = credentials.user or options.get("user") or _own_name()
    password = _Secret(options.get("password", "").encode("utf-8", "surrogateescape"))
    return _Login(socket=socket, user=user, password=password)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        # Containers run as users without an entry in /etc/passwd.
        return str(os.geteuid())


def _open(login: _Login, timeout_s: float) -> Any | MysqlError:  # noqa: ANN401 - PyMySQL has no types
    """Return an open PyMySQL connection, or the error to raise: from here it would carry a frame with the password."""
    try:
        with _without(*_UNUSED):
            import pymysql  # noqa: PLC0415 - slow; loaded only where we talk to a server
            from pymysql.cursors import DictCursor  # noqa: PLC0415
    except ImportError as error:
        from snapmgr.system.environment import install_command  # noqa: PLC0415 - only here

        raise MissingRequirementError(
            f"cannot load the package PyMySQL: {error}", hint=install_command("PyMySQL")
        ) from None
    sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(login.socket)
        raw = pymysql.Connection(
            unix_socket=login.socket,
            user=login.user,
            password=login.password,
            charset="utf8mb4",
            autocommit=True,
            cursorclass=DictCursor,
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            write_timeout=timeout_s,
            program_name="snapmgr",
            # The socket never leaves this machine; and a TLS layer would stand between us and a quick drop().
            ssl_disabled=True,
            # Otherwise it leaves its socket to the garbage collector if the connection fails.
            defer_connect=True,
        )
        # PyMySQL sets this itself for a unix socket: caching_sha2 may send the password in clear.
        raw._secure = True  # type: ignore[attr-defined]  # noqa: SLF001
        raw.connect(sock)
        raw.query(_PLAIN_SESSION)
    except BaseException as error:
        sock.close()
        # Garbage instead of a handshake ends in struct.error, IndexError, …; a SnapmgrError is from a signal handler.
        if isinstance(error, SnapmgrError) or not isinstance(error, Exception):
            raise
        return _login_failure(login, error)
    # PyMySQL keeps it to reconnect, which we never do.
    raw.password = b""
    return raw


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Let this thread's imports of modules that are not loaded yet fail meanwhile; other threads may need them."""
    ours = get_ident()

    class Finder:
        @staticmethod
        def find_spec(name: str, _path: object, _target: object = None) -> None:
            if name in names and get_ident() == ours:
                raise ModuleNotFoundError(f"{name} is not needed", name=name)

    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)


def _login_failure(login: _Login, error: Exception) -> MysqlError:
    where = f"the database server at {login.socket}"
    # PyMySQL wraps the socket's error during the handshake.
    cause = getattr(error, "original_exception", error)
    if isinstance(cause, OSError):
        said = cause.strerror or cause
        return MysqlError(f"cannot connect to {where}: {said}", errno=2002, hint=_socket_hint(login, cause))
    errno, text = _number_and_text(error)
    if isinstance(error, RuntimeError):
        errno, text = _UNKNOWN_PLUGIN, str(error)  # the account's kind of login needs a further package
    if errno in _DENIED:
        account = (
            f"user {login.user!r}, {'with' if login.password else 'without'} password: put user and password into "
            "the [client] group of a defaults-file (mode 600), or create an account for unix_socket (MariaDB) or "
            "auth_socket (MySQL) authentication; an account with REQUIRE SSL or sha256_password is refused as well, "
            "because snapmgr uses the unix socket without TLS: ALTER USER … REQUIRE NONE, or IDENTIFIED WITH "
            "caching_sha2_password"
        )
        return MysqlError(f"{where} refuses us: {text} (error {errno})", errno=errno, hint=account)
    if errno in _LOST:
        return ConnectionLostError(
            f"{where} did not answer the login: {text}", errno=errno, hint="is it starting up, stopping or stopped?"
        )
    if errno == 0:
        return MysqlError(
            f"the process that listens at {login.socket} does not speak the MySQL protocol ({type(error).__name__})"
        )
    hint = "raise max_connections, or end idle clients" if errno == 1040 else None  # noqa: PLR2004 - ER_CON_COUNT_ERROR
    return MysqlError(f"{where} refuses the connection: {text} (error {errno})", errno=errno, hint=hint)


def _socket_hint(login: _Login, cause: OSError) -> str:
    if isinstance(cause, FileNotFoundError):
        return "is the server running? SELECT @@socket on it shows the path to set"
    if isinstance(cause, PermissionError):
        return f"user {_own_name()} may not use this socket: run as root or as the server's user"
    if isinstance(cause, ConnectionRefusedError):
        return "the socket file exists but nobody listens: the server is stopped, or has crashed"
    return f"is {login.socket} the socket of a running server?"


def _statement_failure(sql: str, error: BaseException) -> MysqlError:
    statement = first_words(sql)
    errno, text = _number_and_text(error)
    if errno in _LOST or errno == 0:
        return ConnectionLostError(
            f"{statement}: the connection is lost{f' ({text})' if text else ''}", errno=errno or 2006
        )
    hint: str | None = None
    if errno in _MISSING_PRIVILEGE:
        hint = "grant the account the privilege that the message names (`snapmgr doctor` prints the statement)"
    return MysqlError(f"{statement}: {text} (error {errno})", errno=errno, hint=hint)


def _number_and_text(error: BaseException) -> tuple[int, str]:
    """Return PyMySQL's error number (0: none) and the server's text, bounded."""
    number = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = str(error.args[1]) if number and len(error.args) > 1 else ""
    if number == _SYNTAX_ERROR:
        # The rest of the text quotes the statement with its arguments.
        text = text.split(" near ", 1)[0]
    return number, text if len(text) <= _SERVER_TEXT_SHOWN else text[:_SERVER_TEXT_SHOWN] + "…"
