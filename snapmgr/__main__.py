"""``python -m snapmgr``."""

from __future__ import annotations

import sys

from snapmgr.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
