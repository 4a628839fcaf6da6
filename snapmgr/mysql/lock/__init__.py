"""Locks a server for a snapshot: lock levels, quiesce, freeze, lock probes, positions, replication.

Imports `mysql.connect`, `mysql.datadir` and the catalog's records.
"""
