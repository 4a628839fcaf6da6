"""Plans and conducts a run: which samples, in which order, until there are enough or the budget ends.

The command line imports `session` (one call of ``bench run``), `plan` and `forecast`.
"""
