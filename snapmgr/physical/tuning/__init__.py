"""Measures which settings prepare fastest on a clone in the storage.

Import `tune` (the search, and `climb` for a fixed ladder), `storagebench` (one rung) and `outcome` (the result).
"""
