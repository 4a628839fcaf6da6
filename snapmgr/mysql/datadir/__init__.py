"""A datadir and its files: layout, tablespaces, origin, relocation.

Imports `mysql.connect`.
"""
