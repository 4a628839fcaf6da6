"""TOML files to typed jobs; an error carries the file, the key's path, the value and what is allowed."""

from __future__ import annotations

from snapmgr.config.example import example_config
from snapmgr.config.load import DEFAULT_PATH, default_config, load_config, validate
from snapmgr.config.model import Config, Job, Prepare, Retention, Verify

__all__ = [
    "DEFAULT_PATH",
    "Config",
    "Job",
    "Prepare",
    "Retention",
    "Verify",
    "default_config",
    "example_config",
    "load_config",
    "validate",
]
