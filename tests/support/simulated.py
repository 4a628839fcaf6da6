"""A storage that exists in numbers only, for the tuner: its best settings can be known by trying all."""

from __future__ import annotations

from dataclasses import dataclass

from snapmgr.physical.tuning.rungs import RungSettings, TuningLimits

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SimulatedStorage:
    """A client with a cache before an object store, and a tool that changes pages; each cost may be 0."""

    data_bytes: int = 2 * GIB
    pages: int = 30_000
    get_s: float = 0.015
    put_s: float = 0.025
    bandwidth: float = 1e9
    touched_bytes: int = 700 * MIB
    fsync_s: float = 0.3
    cache_page_s: float = 0.0006
    fast_cache_page_s: float = 0.0004
    upload_page_s: float = 0.0002
    default_cache_bytes: int = 200 * MIB
    tool_s: float = 2.0

    def seconds(self, settings: RungSettings) -> float:
        """Return what a prepare takes from a cold cache, until all is uploaded."""
        memory = settings.use_memory_bytes or 100 * MIB
        short = max(0.0, 1 - memory / self.touched_bytes)
        cache = settings.cache_bytes or self.default_cache_bytes
        evicted = max(0.0, 1 - cache / (1.25 * self.data_bytes))
        gets = self.data_bytes / (4 * MIB) * (1 + 4 * short * evicted)
        reads = gets * (0.1 * evicted if settings.warm_up else 1) * self.get_s
        warm_up = self.data_bytes / self.bandwidth if settings.warm_up else 0.0
        page = self.fast_cache_page_s if settings.cache_dir else self.cache_page_s
        if settings.writeback:
            writes = self.pages * (page + (0 if settings.upload_delay_s else self.upload_page_s))
            fsyncs = 0.01
            settle = self.pages * 16384 / self.bandwidth
        else:
            joined = 0.6 if settings.kernel_writeback else 0.8 if settings.flush_method else 1
            writes = self.pages * joined * self.put_s / (settings.max_uploads or 20) * 3
            fsyncs, settle = self.fsync_s, 0.0
        return self.tool_s + warm_up + reads + writes + (15 + 76 * short) * fsyncs + settle

    def bottleneck(self, settings: RungSettings) -> str:
        """Return what a verdict might call it."""
        if not settings.writeback:
            return "upload"
        return "unknown" if settings.warm_up else "download"


LIMITS = TuningLimits(
    data_bytes=2 * GIB,
    memory_bytes=4 * GIB,
    private=True,
    cache_bytes=20 * GIB,
    client_cache_bytes=200 * MIB,
    cache_dirs=("/fast",),
)
