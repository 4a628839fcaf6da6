"""What is written down of a restore: in its hidden folder, and in the state directory to find that by."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from snapmgr.catalog import Damaged, read_file, sync_folder, write_file
from snapmgr.errors import CatalogError, NotFoundError, SnapmgrError
from snapmgr.manifest import SCHEMA, Process

if TYPE_CHECKING:
    from snapmgr.catalog import Catalog

_HIDDEN = ".snapmgr-restore-"
HIDDEN_NAME = re.compile(r"\.snapmgr-restore-(?P<token>[0-9a-f]{16})")
_RECORD = "record.json"


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """A restore that is under way or was cut short."""

    token: str
    """16 hex digits."""
    snapshot_id: str
    dest: str
    """Absolute, its parent resolved."""
    made_dest: bool
    """Whether the folder `dest` was made by this restore: then it goes with it."""
    holder: Process
    user: str
    began_at: datetime
    inode: int = 0
    """Of the hidden folder: a copy of it, made by somebody else, is not ours."""
    finishing: bool = False
    report: str = ""
    """The restore's result as JSON, once it is finishing."""
    schema: int = SCHEMA

    @property
    def hidden(self) -> str:
        """Name of the hidden folder."""
        return _HIDDEN + self.token


def folder(catalog: Catalog) -> Path:
    """Return the folder of the state directory that names the restores."""
    return catalog.path / "restores"


def _in(hidden_fd: int) -> Path:
    return Path(f"/proc/self/fd/{hidden_fd}", _RECORD)


def recognise(catalog: Catalog, hidden_fd: int, token: str) -> Restoration | None:
    """Given an open folder with a hidden one's name, return what it is of, or None if it is none of ours."""
    info = os.fstat(hidden_fd)
    if info.st_uid not in {0, os.geteuid()}:
        return None
    try:
        record = _decode(read_file(_in(hidden_fd)), _RECORD)
    except NotFoundError:
        # Killed before it was written, or when all else was removed already.
        begun = all(name.startswith(f".{_RECORD}.") for name in os.listdir(hidden_fd))
        known = _of_state(catalog, token) if begun else None
        return replace(known, inode=info.st_ino) if known is not None else None
    except CatalogError:
        return None
    return record if (record.token, record.inode) == (token, info.st_ino) else None


def _encode(record: Restoration) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def _decode(data: bytes, where: str) -> Restoration:
    try:
        record = msgspec.json.decode(data, type=Restoration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CatalogError(f"{where} is damaged: {error}", hint="look at it, and remove it by hand") from None
    if record.schema > SCHEMA or not HIDDEN_NAME.fullmatch(record.hidden):
        raise CatalogError(f"{where} is of another snapmgr", hint="use the newer snapmgr")
    return record


def write_record(hidden_fd: int, record: Restoration) -> None:
    """Store it in its hidden folder, durably."""
    write_file(_in(hidden_fd), _encode(record))


def write_state(catalog: Catalog, record: Restoration) -> None:
    """Store it in the state directory, durably; before anything is made."""
    folder(catalog).mkdir(mode=0o700, exist_ok=True)
    write_file(folder(catalog) / f"{record.token}.json", _encode(record))


def drop_state(catalog: Catalog, record: Restoration) -> None:
    """Forget it, after all that it made is gone or in place; idempotent."""
    (folder(catalog) / f"{record.token}.json").unlink(missing_ok=True)
    sync_folder(folder(catalog))


def _of_state(catalog: Catalog, token: str) -> Restoration | None:
    try:
        path = folder(catalog) / f"{token}.json"
        return _decode(read_file(path), str(path))
    except SnapmgrError:
        return None


def restorations(catalog: Catalog) -> tuple[list[Restoration], list[Damaged]]:
    """Return what the state directory knows of restores under way or cut short, oldest first, and what is damaged."""
    records: list[Restoration] = []
    damaged: list[Damaged] = []
    for path in sorted(folder(catalog).glob("[0-9a-f]*.json")):
        try:
            records.append(_decode(read_file(path), str(path)))
        except NotFoundError:
            continue
        except CatalogError as error:
            damaged.append(Damaged(path=path, problem=error.message))
    return sorted(records, key=lambda record: record.began_at), damaged
