"""Reads InnoDB's tablespace files without a server: page size, number, version, and the paths of other tablespaces.

Sources: MySQL's and MariaDB's fil0types.h and fsp0types.h, for the header of a file's first page.
"""

from __future__ import annotations

import mmap
import os
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.datadir.plainfile import open_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

DICTIONARY = "mysql.ibd"
"""The file of MySQL's data dictionary, in the datadir."""
# FIL_PAGE_SRV_VERSION, FIL_PAGE_SPACE_ID, FSP_SPACE_FLAGS: four bytes each.
_VERSION_OFFSET = 8
_NUMBER_OFFSET = 34
_FLAGS_OFFSET = 54
# FSP_FLAGS_POS_ENCRYPTION.
_ENCRYPTED = 1 << 13
_OLDEST_WITH_VERSION = 8_00_00
_NUMBER = re.compile(r"\bspace(?:[ =]|[ _]id[ :=]+)(?P<number>\d+)")
_PATH = re.compile(rb"\.{0,2}/[^\0-\x1f]{1,500}?\.ib[du]")
_PATH_UPWARDS = re.compile(rb"\.\./[^\0-\x1f]{1,500}?\.ib[du]")
# The end of InnoDB's roll pointer precedes a path: two of its bytes may look like text.
_GARBAGE_BYTES = 2


def page_size(path: str) -> int | None:
    """Return the page size from the header of a system tablespace; None without such a file or with an invalid size.

    Bits 6 to 9 of the flags hold the size, or bits 0 to 3 where bit 4 marks MariaDB's full_crc32 format; 0 means 16
    KiB.
    """
    flags = _header(path, _FLAGS_OFFSET)
    if flags is None:
        return None
    power = flags & 15 if flags & 16 else flags >> 6 & 15
    return 512 << power if 3 <= power <= 7 else 16384 if power == 0 else None  # noqa: PLR2004 - 4 KiB to 64 KiB


def written_by(path: str) -> str:
    """Return the version of the MySQL that wrote a tablespace ("9.7.4"); "" without a file or a version in it."""
    number = _header(path, _VERSION_OFFSET) or 0
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number >= _OLDEST_WITH_VERSION else ""


def name_spaces(text: str, datadir: str) -> str:
    """Return an error's text with the file after each tablespace number: "space=5" becomes "space=5 (./shop/t.ibd)".

    InnoDB's errors may name only the number.
    """
    if _NUMBER.search(text) is None:
        return text
    files = _files_by_number(datadir)

    def named(match: re.Match[str]) -> str:
        file = files.get(int(match["number"]))
        return f"{match[0]} ({file})" if file else match[0]

    return _NUMBER.sub(named, text)


def _files_by_number(datadir: str) -> dict[int, str]:
    found: dict[int, str] = {}
    folders = (entry.name for entry in os.scandir(datadir) if entry.is_dir(follow_symlinks=False))
    for folder in ("", *sorted(folders)):
        for entry in os.scandir(os.path.join(datadir, folder)):
            if entry.name.endswith(".ibd"):
                with suppress(OSError):
                    number = _header(entry.path, _NUMBER_OFFSET)
                    if number is not None:
                        found[number] = os.path.join(".", folder, entry.name)
    return found


def dictionary_paths(datadir: str) -> frozenset[str]:
    """Return the absolute paths of tablespaces in MySQL's data dictionary, perhaps also of dropped ones.

    MySQL keeps the path of a tablespace only there (mysql.tablespace_files).
    """
    found: set[bytes] = set()
    with _mapped(os.path.join(datadir, DICTIONARY)) as data:
        for match in _PATH.finditer(data):
            text = match[0]
            if text.startswith(b"/"):
                found.update(text[at:] for at in range(_GARBAGE_BYTES + 1) if text[at : at + 1] == b"/")
    return frozenset(map(os.fsdecode, found))


def tablespaces_elsewhere(datadir: str) -> frozenset[str]:
    """Return the tablespaces outside a stopped MySQL's datadir (resolved); none for MariaDB, which leaves links.

    Only the dictionary names them. It may still name dropped ones, so only existing files are returned. Raises
    NotQuiescedError if the dictionary is encrypted.
    """
    path = os.path.join(datadir, DICTIONARY)
    if (_header(path, _FLAGS_OFFSET) or 0) & _ENCRYPTED:
        raise NotQuiescedError(
            f"MySQL's data dictionary {path} is encrypted, and only a running server knows where its tables are",
            hint='start the server and give the job its socket and quiesce = "auto"',
        )
    with _mapped(path) as data:
        upwards = {os.fsdecode(match[0]) for match in _PATH_UPWARDS.finditer(data)}
    named = (os.path.realpath(os.path.join(datadir, name)) for name in dictionary_paths(datadir) | upwards)
    return frozenset(name for name in named if os.path.isfile(name) and not name.startswith(datadir + "/"))


def _header(path: str, offset: int) -> int | None:
    """Return the four-byte number at `offset` of the first page; None if the file is missing."""
    with suppress(FileNotFoundError), open_plain(path) as file:
        file.seek(offset)
        return int.from_bytes(file.read(4), "big")
    return None


@contextmanager
def _mapped(path: str) -> Iterator[bytes | mmap.mmap]:
    """Yield a file's content as bytes; empty if the file is missing."""
    try:
        file = open_plain(path)
    except FileNotFoundError:
        yield b""
        return
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
