"""Measures the cost of snapshots on each storage, with the backends that make the backups.

Each task has its own package. All of them may import `model` (the records that they exchange) and `fio`.
"""
