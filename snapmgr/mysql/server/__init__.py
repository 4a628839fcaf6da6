"""Throwaway and development servers on copies of a datadir.

Imports `mysql.connect` and `mysql.datadir`.
"""
