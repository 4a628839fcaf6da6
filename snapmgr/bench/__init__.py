"""The benchmark: what snapshots cost on each storage, measured with the backends that make the backups."""
