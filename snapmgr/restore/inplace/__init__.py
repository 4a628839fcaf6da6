"""Restores in place: the storage puts the origin itself back to a snapshot.

`plan` changes nothing, `run` restores, `remount` unmounts and mounts again. Imported by `cli` and `doctor`.
"""
