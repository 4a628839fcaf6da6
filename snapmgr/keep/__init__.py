"""Retention: prune, delete and pin snapshots.

Imports `backup.sweep` and `access`; the rules themselves are in `snapmgr.retention`.
"""
