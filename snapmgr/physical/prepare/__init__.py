"""Prepares a copy of a finished tool backup: in the storage, on scratch, or on an overlay.

Import `run` (plan and prepare), `order` (its records) and `backupfolder` (what a folder holds).
"""
