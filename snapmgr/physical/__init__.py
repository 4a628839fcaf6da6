"""Physical backups by the servers' own tools: filled into a staging folder, sealed, applied, prepared."""
