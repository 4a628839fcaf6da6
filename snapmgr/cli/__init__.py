"""The command line: one module for each command, imported when it is called; the only room that prints.

Nothing imports it but `snapmgr.__main__` and the console script.
"""
