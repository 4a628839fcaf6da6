"""Makes a fresh instance of each compared storage for a sample: see `snapmgr.bench.model.Workbench`.

Others import `stacks` (the list), `workbench` (one sample's storage) and `leftovers` (cleanup of killed runs).
"""
