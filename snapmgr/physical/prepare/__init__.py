"""Preparing a finished backup: where and how is the shortest, and doing it."""
