"""Defines the table ``[backend.juicefs]`` of the configuration."""

from __future__ import annotations

from msgspec import Struct, field


class JuicefsConfig(Struct, frozen=True, kw_only=True):
    """``[backend.juicefs]``."""

    store: str = ".snapmgr-juicefs"
    """Folder of the clones, relative to the top of the mount that holds the origin, and outside of the origin."""
    program: str | None = None
    """Path of the client program. Default: ``juicefs`` in the PATH, or beside this Python."""
    meta_url: str | None = None
    """Address of the volume's metadata, without a password. Default: that of the running client. Used for quotas, other
    clients and garbage, which the mount does not show, and for private mounts."""
    meta_urls: dict[str, str] = field(default_factory=dict)
    """The same for several volumes, by name or UUID."""
    password_file: str | None = None
    """File with the metadata's password, unreadable for others. Default: META_PASSWORD of snapmgr's environment."""
    metadata_dumps: str | None = None
    """Folder of dumps of the metadata (``juicefs dump``): warn if the newest is too old."""
    metadata_dumps_max_age_hours: float = 26.0
    """Maximum age of the newest dump."""
    ask_metadata: bool = True
    """Ask the metadata engine for quotas and for mounts on other machines: two short programs."""
    skip_trash: bool = False
    """Bypass the volume's trash when deleting snapshots: their space is free immediately; recovery is impossible."""
    cache_root: str = "/var/tmp"  # noqa: S108 - each mount makes a folder of its own there, closed to others
    """Folder for the caches of private mounts."""
