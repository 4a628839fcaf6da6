"""A kit for backends whose snapshots are copies of folders: `CopyStoreBackend`, and the store that holds the copies.

Imports only `snapmgr.system`, `snapmgr.tree` and the contract; backends get it from `snapmgr.api.copystore`.
"""
