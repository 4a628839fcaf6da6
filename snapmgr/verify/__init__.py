"""Proof that a snapshot restores: a throwaway server on a writable clone; also clones and prepared copies.

Imports `physical`, `access`, `mysql` and what is below them.
"""
