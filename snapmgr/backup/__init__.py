"""Taking a snapshot: quiesce, fire, publish; and completing or removing what a killed run left.

`run` is the entry. Imports `physical`, `source`, `access` and what is below them.
"""
