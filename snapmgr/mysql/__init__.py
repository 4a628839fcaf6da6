"""Handles MySQL and MariaDB: connections, locks, layout of the data, servers on copies, binary logs. See each room.

Imports `system`, `contract` and the catalog's records.
"""
