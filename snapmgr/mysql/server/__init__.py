"""Throwaway and development servers on copies of a datadir, and the checks of their tables.

Imports `mysql.connect` and `mysql.datadir`.
"""
