"""The operations of a trace as one HTML page that needs nothing else: threads × time, with totals of what is in view.

The page's parts lie beside this file; see packing.py for how the operations get into it. Nothing is fetched: its
content security policy allows the page's own script and style by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import IO

from jinja2 import DictLoader, Environment, StrictUndefined

from snapmgr.trace.operations import Operations
from snapmgr.trace.page.packing import pack
from snapmgr.trace.verdict import Verdict

_SCRIPTS = ("unpack.js", "words.js", "model.js", "paint.js", "tables.js", "view.js", "main.js")


def write_page(operations: Operations, verdict: Verdict | None, out: IO[bytes], *, title: str = "JuiceFS") -> None:
    """Write the page to a binary file. At a million operations it has some 10 MB and takes some 10 s to make.

    `title` says whose operations they are: the name of the trace's file.
    """
    style = _part("page.css")
    script = '"use strict";\n(() => {\n' + "".join(map(_part, _SCRIPTS)) + "})();\n"
    environment = Environment(
        loader=DictLoader({"page": _part("page.html")}), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    parts = environment.get_template("page").generate(
        title=title,
        findings=() if verdict is None else verdict.findings,
        sentence=_sentence,
        skipped=operations.skipped,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=pack(operations),
    )
    for part in parts:
        # Names of files need not be text.
        out.write(part.encode(errors="replace"))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
