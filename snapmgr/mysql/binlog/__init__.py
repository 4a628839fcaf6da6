"""Reads binary logs: events, GTID sets, and the position at their end.

Imports `mysql.datadir` and the catalog's records.
"""
