"""The machine: system calls, loop devices, facts of this boot, paths and the mount table.

Any room but the contract may import these modules; backends get them from `snapmgr.api.kernel`.
"""
