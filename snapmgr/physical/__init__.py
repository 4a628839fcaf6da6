"""Backups by the servers' own tools: run, sealed, snapshotted and prepared.

Imports `source`, `access` and what is below them; `backup`, `verify` and `restore` use it.
"""
