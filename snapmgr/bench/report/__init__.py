"""Makes the report from samples: a JSON `document`, one self-contained HTML page, and CSV rows.

The command line imports `document`, `render`, `rows` and `COLUMNS` from here and nothing else.
"""

from __future__ import annotations

import json
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from snapmgr.bench.report import pictures
from snapmgr.bench.report.content import SCHEMA, document
from snapmgr.bench.report.rows import COLUMNS, rows
from snapmgr.contract.units import format_quantity

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COLUMNS", "SCHEMA", "document", "render", "rows"]


def render(document: Mapping[str, Any]) -> str:
    """Return the page that shows a `document` and nothing else."""
    environment = Environment(
        loader=DictLoader({name: _part(f"{name}.html") for name in ("page", "experiment")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    labels = document["labels"]
    environment.filters["label"] = labels.__getitem__
    order = [stack for scenario in document["scenarios"] for stack in scenario["stacks"]]
    return environment.get_template("page").render(
        doc=document,
        anchors={one["id"]: one["anchor"] for scenario in document["scenarios"] for one in scenario["ratios"]},
        sections={one["id"]: each["anchor"] + "-ratios" for each in document["scenarios"] for one in each["ratios"]},
        colours={stack: number for number, stack in enumerate(dict.fromkeys(order))},
        style=Markup(_part("page.css")),  # noqa: S704 - a file of ours
        draw=pictures,
        label=labels.__getitem__,
        quantity=format_quantity,
        middle=median,
        sentence=_sentence,
        json=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
