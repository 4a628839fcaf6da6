"""How much the tests try: what CI has time for, or with ``SNAPMGR_CAMPAIGN=1`` all that they know."""

from __future__ import annotations

import os

CAMPAIGN = os.environ.get("SNAPMGR_CAMPAIGN") == "1"


def crash_every(default: int) -> int:
    """Return N where one in N points is tried: $SNAPMGR_CRASH_EVERY, else 1 in a campaign, else `default`."""
    return int(os.environ.get("SNAPMGR_CRASH_EVERY", "1" if CAMPAIGN else str(default)))
