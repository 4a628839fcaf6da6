"""The servers' own backup tools: choosing one, running it, reading what it reports.

Import `choose` (tools and their choice) and `request` (what a tool is asked, and its errors).
"""
