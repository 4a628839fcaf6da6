"""The contract suite over the backend of docs/how-to/write-a-backend.md, taken from the text of that page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from snapmgr.api.copystore import CopyStoreBackend

_GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-backend.md"
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)

_BACKEND, _TESTS = _BLOCKS
my_backend = ModuleType("my_backend")
# Where dataclass, and the guide's own import, look for it.
sys.modules["my_backend"] = my_backend
exec(compile(_BACKEND, str(_GUIDE), "exec"), vars(my_backend))  # noqa: S102 - it is our own text
exec(compile(_TESTS, str(_GUIDE), "exec"), globals())  # noqa: S102


@pytest.fixture
def tmp_path(quiet: Path | None, tmp_path: Path) -> Path:
    """Its space is watched: on a file system that nobody beside fills and empties."""
    if quiet is None:
        return tmp_path
    made = quiet / tmp_path.name
    made.mkdir()
    return made


def test_the_guide_defines_what_it_says() -> None:
    assert my_backend.CopyBackend.name == "copy"
    assert issubclass(globals()["TestCopyBackend"], globals()["BackendContract"])


def test_a_backend_on_the_kit_is_short() -> None:
    assert len(_BACKEND.splitlines()) <= 90
    assert issubclass(my_backend.CopyBackend, CopyStoreBackend)
