"""The machine: programs, files, mounts, block devices, processes and facts about the host.

Imports only `snapmgr.contract`. This is the only room that starts programs or asks udev.
"""
