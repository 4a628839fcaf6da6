"""``python -m support.eager``: snapmgr with an index and marks from the first snapshot on.

Otherwise only state directories with very many snapshots have them, and a crash trial none.
"""

from __future__ import annotations

import sys

from snapmgr.catalog import index, joblock
from snapmgr.cli.main import main

if __name__ == "__main__":
    index.WORTH = joblock.WORTH = 1
    index._SETTLED_NS = 2 * 10**7  # what the trials do is further apart than ticks of the clock
    sys.exit(main())
