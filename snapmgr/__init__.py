"""Snapshot-based backups of MySQL and MariaDB on copy-on-write storage."""

__version__ = "0.1.0"
