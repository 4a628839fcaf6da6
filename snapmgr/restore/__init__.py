"""Restores snapshots to a new directory, or in place.

Imports `physical`, `access`, `mysql` and what is below them.
"""
