"""Measures one property of a running system: counters, memory bounds, file layouts, caches, idle time, proofs.

The modules are independent of each other; `storage`, `scenarios` and `run` may import them.
"""
