"""Chooses, examines and claims the device that a run writes to, and says what hardware it is.

Others import `target` (open or preview one), `precondition`, `hostfacts`, `identity` and `mark`.
"""
