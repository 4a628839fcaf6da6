"""Computes ratios with intervals, findings, comparisons, changes between runs, and advice from samples. Pure.

Reports, the run (to decide when to stop) and `published` may import any module here. No other package imports scipy
or numpy.
"""

from importlib.util import find_spec

from snapmgr.contract.errors import MissingRequirementError
from snapmgr.system.environment import install_command

if find_spec("scipy") is None:
    raise MissingRequirementError(
        "the benchmark needs scipy for its statistics, and scipy is not installed",
        hint=f"install the extra of snapmgr that brings it: {install_command('snapmgr[bench]')}",
    )
