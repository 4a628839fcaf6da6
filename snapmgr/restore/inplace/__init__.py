"""In-place restore: the storage puts the origin itself back to a snapshot.

`plan` looks, `run` acts, `remount` unmounts and mounts again. Imported by `cli` and `doctor`.
"""
