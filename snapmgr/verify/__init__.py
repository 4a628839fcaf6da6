"""Proves that a snapshot restores, with a throwaway server on a writable clone; also runs clones, and prepares copies.

Imports `physical`, `access`, `mysql` and what is below them.
"""
