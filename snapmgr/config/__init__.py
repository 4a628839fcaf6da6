"""Configuration: TOML files to typed jobs, and the storage backends that they name.

Import its modules; the package itself loads nothing. Uses `system` and `contract`.
"""
