"""InnoDB's tablespaces by their numbers, which are all that its errors may name."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from snapmgr.mysql.plainfile import open_plain

# FIL_PAGE_SPACE_ID of a file's first page (fil0types.h).
_SPACE_OFFSET = 34
_SPACE = re.compile(r"\bspace(?:[ =]|[ _]id[ :=]+)(?P<number>\d+)")


def name_spaces(text: str, datadir: str) -> str:
    """Return an error's text with the file after each tablespace number: "space=5" becomes "space=5 (./shop/t.ibd)"."""
    if _SPACE.search(text) is None:
        return text
    files = _space_files(datadir)

    def named(match: re.Match[str]) -> str:
        file = files.get(int(match["number"]))
        return f"{match[0]} ({file})" if file else match[0]

    return _SPACE.sub(named, text)


def _space_files(datadir: str) -> dict[int, str]:
    found: dict[int, str] = {}
    folders = (entry.name for entry in os.scandir(datadir) if entry.is_dir(follow_symlinks=False))
    for folder in ("", *sorted(folders)):
        for entry in os.scandir(os.path.join(datadir, folder)):
            if entry.name.endswith(".ibd"):
                with suppress(OSError), open_plain(entry.path) as file:
                    file.seek(_SPACE_OFFSET)
                    found[int.from_bytes(file.read(4), "big")] = os.path.join(".", folder, entry.name)
    return found
