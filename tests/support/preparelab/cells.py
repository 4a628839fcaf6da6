"""What is compared: settings of the store, sizes of the backup, and ways to prepare it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from support.objectstore import Pace

_REQUEST_BYTES_S = 100 << 20
"""What one connection to an object store gives, whatever all of them together do."""
_PUT_LATENCY = 5 / 3
"""Of a PUT by that of a GET: 25 ms and 15 ms were measured."""
_PAGE_BYTES = 16 << 10
_REDO_BYTES_A_PAGE = 4096

BASE_DATA_BYTES = 512 << 20
BASE_REDO_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting."""

    gbit: float
    """Total bandwidth of the store in each direction; 0: no limit."""
    latency_ms: float
    """Of a GET."""
    data: int
    """How often the base size."""
    redo: int

    @property
    def id(self) -> str:
        """ "1gbit/15ms/data1/redo4"; "nolimit" without a limit."""
        total = f"{self.gbit:g}gbit" if self.gbit else "nolimit"
        return f"{total}/{self.latency_ms:g}ms/data{self.data}/redo{self.redo}"

    @property
    def pace(self) -> Pace:
        """How slow the store is."""
        latency_s = self.latency_ms / 1000
        return Pace(
            get_latency_s=latency_s,
            put_latency_s=latency_s * _PUT_LATENCY,
            request_bytes_s=_REQUEST_BYTES_S,
            total_bytes_s=round(self.gbit * 1e9 / 8),
        )


def all_cells() -> list[Cell]:
    """Return every cell, those that share a backup together; last one that knows no limit of the total."""
    sizes = product((1, 4), (1, 4))
    cells = [
        Cell(gbit=gbit, latency_ms=latency_ms, data=data, redo=redo)
        for (data, redo), gbit, latency_ms in product(sizes, (1.0, 10.0), (1.0, 15.0))
    ]
    return [*cells, Cell(gbit=0, latency_ms=15.0, data=4, redo=2)]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to prepare."""

    name: str
    by_hand: bool = False
    """juicefs clone and mariadb-backup --prepare, as somebody would without snapmgr; else `snapmgr prepare`."""
    mount: tuple[str, ...] = ()
    """The client's options. SMALL and LARGE stand for cache sizes in MiB: a tenth of the data, and all of it twice."""
    tool: tuple[str, ...] = ()
    """By hand: the tool's options. MEMORY stands for what holds all pages that the redo log changes."""
    options: tuple[str, ...] = ()
    """Those of `snapmgr prepare`."""
    search: bool = False
    """Whether ``--tune`` looks for the settings first, once for a cell; then those that were found are measured."""


_SMALL = ("--cache-size", "SMALL")
_MEMORY = "--use-memory=MEMORY"
_IO = ("--innodb-read-io-threads=16", "--innodb-write-io-threads=16")
_MORE_IO = ("--innodb-read-io-threads=64", "--innodb-write-io-threads=64")

WAYS = (
    # The published ladder.
    Way(name="default", by_hand=True, mount=_SMALL),
    Way(name="memory", by_hand=True, mount=_SMALL, tool=(_MEMORY,)),
    Way(name="threads", by_hand=True, mount=_SMALL, tool=(_MEMORY, *_IO)),
    Way(name="writeback", by_hand=True, mount=(*_SMALL, "--writeback"), tool=(_MEMORY, *_IO)),
    Way(name="cache", by_hand=True, mount=("--cache-size", "LARGE", "--writeback"), tool=(_MEMORY, *_MORE_IO)),
    # snapmgr's.
    Way(name="storage", mount=_SMALL, options=("--strategy", "storage")),
    Way(name="scratch", mount=_SMALL, options=("--strategy", "scratch", "--result", "scratch")),
    Way(name="auto", mount=_SMALL),
    Way(name="auto-storage", mount=_SMALL, options=("--result", "storage")),
    Way(name="tune", mount=_SMALL, search=True),
)
RESULT_ANYWHERE = ("default", "memory", "threads", "writeback", "cache", "storage", "scratch")
"""The ways that "auto" is compared with."""
RESULT_IN_STORAGE = ("default", "memory", "threads", "writeback", "cache", "storage")


def client_options(way: Way, data_bytes: int) -> tuple[str, ...]:
    """Return how the volume is mounted."""
    sizes = {"SMALL": str(max(data_bytes // 10 >> 20, 32)), "LARGE": str(data_bytes * 2 >> 20)}
    return tuple(sizes.get(word, word) for word in way.mount)


def tool_options(way: Way, data_bytes: int, redo_bytes: int) -> tuple[str, ...]:
    """Return the tool's options."""
    pages = min(redo_bytes // _REDO_BYTES_A_PAGE, data_bytes // _PAGE_BYTES)
    memory = (pages * _PAGE_BYTES * 3 // 2 + (128 << 20)) >> 20
    return tuple(word.replace("MEMORY", f"{memory}M") for word in way.tool)


def guess_s(cell: Cell, way: Way, data_bytes: int, redo_bytes: int) -> float:
    """Return about how long one sample takes, to say when all will be done; within a factor of three."""
    pages = min(redo_bytes / _REDO_BYTES_A_PAGE, data_bytes / _PAGE_BYTES)
    default = 3 + pages * (0.0012 + cell.latency_ms / 1000 * 0.13)
    scratch = 3 + data_bytes / min(cell.gbit * 1e9 / 8 or 4e8, 4e8)
    factor = {"tune": 8.0, "writeback": 0.4, "cache": 0.4}.get(way.name, 1.0)
    quick = way.name in {"scratch", "auto", "auto-storage"}
    return 5 + (scratch if quick else default * factor)
