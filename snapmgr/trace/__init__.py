"""Records, analyses, judges and draws the access log of a JuiceFS client.

Import its modules; the package itself loads nothing. Uses `system` and `contract`.
"""
