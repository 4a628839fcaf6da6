"""Provides a kit for backends whose snapshots are copies of folders: `CopyStoreBackend`, and the store of the copies.

Imports only `snapmgr.system`, `snapmgr.tree` and the contract; backends get it from `snapmgr.api.copystore`.
"""
