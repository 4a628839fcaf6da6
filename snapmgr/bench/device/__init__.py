"""Chooses, examines and claims the device that a run writes to, and describes its hardware.

Others import `target` (open or preview one), `precondition`, `hostfacts`, `identity` and `mark`.
"""
