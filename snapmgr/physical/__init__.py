"""Physical backups by the servers' own tools: made (`tools`), sealed (`seal`), prepared (`prepare`), tuned (`tuning`).

Import `tools.choose`, `tools.request`, `seal`, `prepare.run`, `prepare.order` and `tuning.tune`.
"""
