"""The state directory: manifests, states, leases, locks and records of unfinished work.

Imports `system` and `contract`. Commands use the catalog through the `Context`.
"""
