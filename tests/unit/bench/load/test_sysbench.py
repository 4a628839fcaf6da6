"""What sysbench prints, read."""

from __future__ import annotations

import pytest

from snapmgr.bench.load.sysbench import parse
from snapmgr.contract.errors import CommandError

PRINTED = """sysbench 1.0.20 (using system LuaJIT 2.1.0-beta3)

Threads started!

[ 1s ] thds: 8 tps: 111.70 qps: 2351.63 (r/w/o: 1659.51/460.78/231.34) lat (ms,95%): 204.11 err/s: 0.00 reconn/s: 0.00
[ 2s ] thds: 8 tps: 0.00 qps: 0.00 (r/w/o: 0.00/0.00/0.00) lat (ms,95%): 0.00 err/s: 0.00 reconn/s: 0.00
SQL statistics:
    queries performed:
        read:                            5208
        total:                           7440
    transactions:                        372    (123.97 per sec.)
    queries:                             7440   (2479.40 per sec.)

Latency (ms):
         min:                                   10.58
         avg:                                   64.43
         max:                                  544.10
         95th percentile:                      164.45
         sum:                                23970.08
"""


def test_read() -> None:
    report = parse(PRINTED)
    assert (report.tps, report.p95_s, report.max_s) == pytest.approx((123.97, 0.16445, 0.5441))
    assert report.seconds_tps == (111.70, 0.0)
    assert report.seconds_p95_s == pytest.approx((0.20411, 0.0))


@pytest.mark.parametrize("text", ["", "FATAL: unable to connect to MySQL server", PRINTED.replace("transactions:", "")])
def test_no_result(text: str) -> None:
    with pytest.raises(CommandError, match="sysbench printed no result"):
        parse(text)
