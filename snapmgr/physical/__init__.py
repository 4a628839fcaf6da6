"""Makes (`tools`), seals (`seal`), prepares (`prepare`) and tunes (`tuning`) backups by the servers' own tools.

Imports `source`, `access` and what is below them; `backup`, `verify`, `restore`, `cli` and `bench` import it.
"""
