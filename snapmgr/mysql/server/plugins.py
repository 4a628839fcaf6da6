"""Loads the plugins into a server on a copy without which it could not open tables of its source."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from snapmgr.mysql.datadir.settings import PLUGINS
from snapmgr.mysql.server.options import plugin_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from snapmgr.mysql.server.program import ServerBinary

# Engines whose data are files of the datadir and that need no other program, and MariaDB's compression. Not those that
# would connect to another server: a copy has no network.
_OF_TABLES = re.compile(r"ha_(?:archive|blackhole|rocksdb)|provider_(?:bzip2|lz4|lzma|lzo|snappy)")


def table_plugins(binary: ServerBinary, settings: Mapping[str, str], options: Sequence[str] = ()) -> Iterator[str]:
    """Yield the options that load the plugins which the tables of the source need, if they are installed here.

    Args:
        binary: the server's program.
        settings: `Layout.settings` of the source.
        options: the user's options, which may name another folder of plugins.
    """
    folder = plugin_folder(binary, options)
    names = [name for name in settings.get(PLUGINS, "").split() if _OF_TABLES.fullmatch(name)]
    here = [name for name in names if folder is not None and os.path.isfile(os.path.join(folder, f"{name}.so"))]
    if here and binary.flavor == "mariadb":
        # The source's server accepted their maturity; the default depends on the server's own.
        yield "--plugin-maturity=unknown"
    for name in here:
        yield f"--plugin-load-add={name}.so"
    if "ha_rocksdb" in here:
        # Otherwise 512 MiB.
        yield "--loose-rocksdb-block-cache-size=16777216"
