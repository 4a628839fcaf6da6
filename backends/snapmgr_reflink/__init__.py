"""Snapshots as copies of a directory tree whose files share their blocks (FICLONE), for XFS, btrfs and bcachefs."""

from __future__ import annotations

from snapmgr_reflink.backend import ReflinkBackend, ReflinkConfig

__all__ = ["ReflinkBackend", "ReflinkConfig"]
