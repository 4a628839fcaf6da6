"""The servers' own backup tools: choosing one, running it, reading its report.

Import `choose` (the tools) and `request` (requests, results and errors of a tool).
"""
