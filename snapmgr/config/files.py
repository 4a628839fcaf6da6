"""Finds and reads the configuration files; refuses those that others can modify, as root runs commands from them."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from typing import TYPE_CHECKING, Any

from snapmgr.contract.errors import ConfigError
from snapmgr.system.trust import changeable

if TYPE_CHECKING:
    from pathlib import Path

_WHERE_IN_TOML = r" \(at (?:line (\d+), column \d+|end of document)\)$"
_MAX_BYTES = 1 << 20
# Keys are at most four levels deep. Much deeper nesting would exhaust the stack of recursive functions.
_DEEPEST = 32


def list_files(main: Path, errors: list[str]) -> list[Path]:
    """Return the main file and ``conf.d/*.toml`` beside it; append to `errors` if that folder cannot be used."""
    folder = main.parent / "conf.d"
    try:
        entries = sorted(folder.iterdir())
        _refuse_changeable(folder, folder.stat())
    except (FileNotFoundError, NotADirectoryError):
        entries = []
    except OSError as error:
        errors.append(f"{folder}: cannot be read: {error.strerror}")
        entries = []
    except ConfigError as error:
        errors.append(error.message)
        entries = []
    # Editors leave ".#job.toml" beside the file that they edit.
    return [main, *(entry for entry in entries if entry.suffix == ".toml" and not entry.name.startswith("."))]


def read_toml(file: Path) -> dict[str, Any]:
    """Return a file's TOML. Raises ConfigError with file and line, also for a file that others can modify."""
    try:
        document = tomllib.loads(_read(file).decode())
    except FileNotFoundError:
        raise ConfigError(f"{file}: does not exist; `snapmgr config init` writes an example") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}, line {line}: is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        place = re.search(_WHERE_IN_TOML, said)
        where = f"line {place[1]}" if place and place[1] else "last line"
        raise ConfigError(f"{file}, {where}: is not TOML: {re.sub(_WHERE_IN_TOML, '', said)}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: is nested too deeply") from error
    except ValueError as error:
        # Not a TOMLDecodeError: Python limits the digits of a number (int_max_str_digits).
        raise ConfigError(f"{file}: has a number that is too long") from error
    if _is_deep(document):
        raise ConfigError(f"{file}: is nested too deeply")
    return document


def _read(file: Path) -> bytes:
    # Without O_NONBLOCK, opening a FIFO blocks forever.
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{file}: is not a regular file")
        _refuse_changeable(file, status)
        with open(fd, "rb", closefd=False) as opened:
            data = opened.read(_MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{file}: is too large for a configuration (more than {_MAX_BYTES} bytes)")
    return data


def _refuse_changeable(path: Path, status: os.stat_result) -> None:
    why = changeable(status)
    if why is not None:
        raise ConfigError(
            f"{path}: {why}, so others could make snapmgr run their commands; "
            f"try: chown {os.geteuid()} {path} && chmod go-w {path}"
        )


def _is_deep(document: dict[str, Any]) -> bool:
    """Return whether tables and lists are nested too deeply; dotted keys nest them without recursion in the parser."""
    level: list[Any] = [document]
    for _ in range(_DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
