"""The source of a job: its server or directory, its volumes, and the backend that snapshots them.

Imports `mysql` and the rooms below it; changes nothing on the machine.
"""
