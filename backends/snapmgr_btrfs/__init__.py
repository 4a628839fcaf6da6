"""Snapshots of btrfs subvolumes: atomic, read-only, kept in a folder at the top of the same file system."""

from __future__ import annotations

from snapmgr_btrfs.backend import BtrfsBackend, BtrfsConfig

__all__ = ["BtrfsBackend", "BtrfsConfig"]
