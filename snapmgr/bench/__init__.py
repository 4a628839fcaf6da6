"""The benchmark: measures what snapshots cost on each storage, with the backends that make the backups.

Each task has a room. Every room may import `model`, the records that the parts hand to each other, and `fio`.
"""
