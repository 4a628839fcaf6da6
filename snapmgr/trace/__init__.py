"""Traces of a JuiceFS client: its access log recorded, analysed, judged and drawn.

Import its modules; the package itself loads nothing. Uses `system` and `contract`.
"""
