"""Runs throwaway and development servers on copies of a datadir, and checks their tables.

Imports `mysql.connect` and `mysql.datadir`.
"""
