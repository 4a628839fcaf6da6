"""Checks the documents of ``--json`` against their published types."""

from __future__ import annotations

from typing import Any

import msgspec

from snapmgr.cli.schema import KEYS, kind_of

_COMMON = {"schema_version", "command", "exit_code", "error"}


def conforms(document: Any) -> None:
    """Fail unless a document has its command's keys, with values of their types."""
    kind = kind_of(document["command"])
    msgspec.convert(document, kind)
    promised = _COMMON | KEYS[document["command"]].keys()
    if not document["command"].startswith("bench"):  # its pages have more
        assert document.keys() == promised, document.keys() ^ promised
