"""Writes a trace as one self-contained HTML page: a timeline of the threads, with totals for the visible part.

The page's parts are beside this file; packing.py packs the operations into it. The page fetches nothing: its content
security policy allows only its own script and style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import IO

from jinja2 import DictLoader, Environment, StrictUndefined

from snapmgr.trace.accesslog import Trace
from snapmgr.trace.analysis import Analysis, described
from snapmgr.trace.compare import Side, aligned, caveats, changed, measures
from snapmgr.trace.page.packing import pack
from snapmgr.trace.sampling import series
from snapmgr.trace.verdict import Verdict

_SCRIPTS = ("unpack.js", "words.js", "model.js", "paint.js", "tables.js", "view.js", "main.js")


def write_page(
    trace: Trace,
    out: IO[bytes],
    *,
    analysis: Analysis | None = None,
    verdict: Verdict | None = None,
    title: str = "JuiceFS",
) -> None:
    """Write the page to a binary file; a million operations take some 10 MB and 10 s.

    `title` names the trace: the name of its file. The caveats and holes of the analysis are shown.
    """
    holes = () if analysis is None else analysis.holes
    _write(
        out,
        data=pack(trace.recorded, [(hole.from_us, hole.to_us, "") for hole in holes], series(trace)),
        title=title,
        described=described(trace),
        verdict=verdict,
        caveats=() if analysis is None else analysis.caveats,
    )


def write_comparison(a: Side, b: Side, out: IO[bytes], *, title: str) -> None:
    """Write the page of two recordings to a binary file: both timelines on one axis, and what changed."""
    operations, holes, drawn = aligned(a, b)
    rows = [(each.name, each.shown(each.a), each.shown(each.b), each.change) for each in measures(a, b)]
    _write(
        out,
        data=pack(operations, holes, drawn, compared=True),
        title=title,
        described="",
        verdict=None,
        caveats=caveats(a, b),
        changed=changed(a, b),
        measures=rows,
    )


def _write(
    out: IO[bytes],
    *,
    data: str,
    title: str,
    described: str,
    verdict: Verdict | None,
    caveats: Sequence[str],
    changed: Sequence[str] = (),
    measures: Sequence[tuple[str, ...]] = (),
) -> None:
    style = _part("page.css")
    script = '"use strict";\n(() => {\n' + "".join(map(_part, _SCRIPTS)) + "})();\n"
    environment = Environment(
        loader=DictLoader({"page": _part("page.html")}), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    parts = environment.get_template("page").generate(
        title=title,
        described=described,
        findings=() if verdict is None else verdict.findings,
        condition=verdict.condition if verdict is not None else None,
        caveats=caveats,
        changed=changed,
        measures=measures,
        sentence=_sentence,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=data,
    )
    for part in parts:
        # File names may not be valid Unicode.
        out.write(part.encode(errors="replace"))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
