"""One snapshot in its storage: attach, release, annotate, delete, and the paths inside it.

Imports `capacity`, `catalog`, `mysql` and what is below them; used by the rooms of all commands.
"""
