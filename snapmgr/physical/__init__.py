"""Physical backups by the servers' own tools: made (`tools`), sealed (`seal`), prepared (`prepare`), tuned (`tuning`).

Imports `source`, `access` and what is below them; `backup`, `verify`, `restore`, `cli` and `bench` import it.
"""
