"""Directory trees, handled by descriptors: walk, measure, copy, compare, remove.

Import its modules; the package itself loads nothing. Uses `contract`.

Every step is relative to an open folder, and never through a symlink or into another mount. So names that are not
UTF-8, very long paths, and folders that somebody replaces meanwhile do no harm.

Why not ``cp -a --reflink=auto`` or rsync (coreutils 9.1, rsync 3.2)? cp reports no progress, nor which files it shared
(--debug came with 9.3). It takes paths, so it fails beyond 4,096 bytes. It syncs nothing, and cannot copy btrfs's NOCOW
attribute, without which a nodatacow datadir cannot be cloned. rsync shares no blocks. With either, the walks that
measure the tree, compare it and remove an unfinished copy would still be needed; the copy is the smallest part.
"""
