"""Examines jobs, storage and the state directory, and repairs what it can.

Imports the rooms of all commands; only `cli` imports it.
"""
