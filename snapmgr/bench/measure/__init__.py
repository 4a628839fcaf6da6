"""Measures one property of a running system: counters, memory bounds, file layouts, caches, idle time, proofs.

Each module stands alone and may be imported by `storage`, `scenarios` and `run`.
"""
