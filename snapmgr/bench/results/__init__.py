"""Reads and writes the folder of results: `run.json` and one file per sample, each written once.

Others import `samples` (read, write); `documents` defines the fields, `folder` the place.
"""
