"""Prunes, deletes and pins snapshots.

Imports `backup.sweep` and `access`; the rules themselves are in `snapmgr.retention`.
"""
