"""Checks the documents of ``--json`` against their published types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from snapmgr.cli.schema import KEYS, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMON = {"schema_version", "command", "exit_code", "error"}


def _missing(document: Any, typed: Any, path: str = "") -> Iterator[str]:
    """Yield the keys, at any depth, that were lost when a document became typed."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in typed:
                yield from _missing(value, typed[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(document, list):
        for one, other in zip(document, typed, strict=True):
            yield from _missing(one, other, path)


def conforms(document: Any) -> None:
    """Fail unless a document has its command's keys, with values of their types."""
    kind = kind_of(document["command"])
    typed = msgspec.to_builtins(msgspec.convert(document, kind))
    unknown = list(_missing(document, typed))
    assert not unknown, f"not in the schema: {unknown}"
    promised = _COMMON | KEYS[document["command"]].keys()
    if not document["command"].startswith("bench"):  # its pages have more
        assert document.keys() == promised, document.keys() ^ promised
