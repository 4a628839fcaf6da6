"""Schedules: calendar expressions, systemd units and cron files for jobs, and their installation.

Import its modules; the package itself loads nothing. Uses `config`, `catalog`, `system` and `contract`.
"""
