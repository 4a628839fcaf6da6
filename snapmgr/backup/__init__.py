"""Takes a snapshot: quiesce, fire, publish; and completes or removes the leftovers of a killed run.

`run` is the entry. Imports `physical`, `source`, `access` and what is below them.
"""
