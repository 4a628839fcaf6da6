"""Snapshots as clones of folders in a JuiceFS volume (Community Edition)."""
