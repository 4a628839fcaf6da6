"""Whole directory trees, handled by descriptors: measured, copied, compared, removed.

Every step is taken relative to an open folder and never through a symlink or into another mount, so that names that
are not UTF-8, paths longer than the kernel takes at once and people who exchange folders meanwhile make no difference.

Why not ``cp -a --reflink=auto`` or rsync? Both were looked at (coreutils 9.1, rsync 3.2). cp says nothing while it
copies, nor afterwards what it shared and what it copied (--debug came with 9.3), takes paths and so fails beyond 4,096
bytes, syncs nothing, and cannot be made to agree with btrfs's NOCOW attribute, without which no clone of a nodatacow
datadir is possible. rsync shares no blocks. With either, the walk that measures the tree before (room, progress), the
one that compares it afterwards and the one that removes a half-made copy would be here all the same; the copy itself is
the smallest of the four.
"""
