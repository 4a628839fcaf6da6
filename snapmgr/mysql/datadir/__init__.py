"""Examines a datadir and its files: layout, settings, tablespaces, origin, isolation of a copy, relocation.

Imports `mysql.connect`.
"""
