"""Chooses and runs the servers' own backup tools, and reads their reports.

Import `choose` (the tools) and `request` (requests, results and errors of a tool).
"""
