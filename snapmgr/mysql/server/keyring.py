"""Gives a server on a copy access to the keys of encrypted data.

Secrets are never recorded or put on a command line: options name a key file by its path. The source's server read it as
the datadir's owner, so that user must be able to read it here too. Root never reads a key.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.mysql.datadir.settings import BY_FILE, COMPONENT, MARIADB_KEYS, RING
from snapmgr.mysql.server.options import plugin_folder
from snapmgr.mysql.server.rundir import as_user
from snapmgr.system.command import CommandRunner
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from snapmgr.mysql.datadir.copy import IsolatedCopy, Originals
    from snapmgr.mysql.server.program import ServerBinary

_MARIADB_PLUGIN = "file_key_management"
_MYSQL_COMPONENT = "component_keyring_file"
_CONFIG_BYTES = 64 << 10
_PLUGINS = "plugins"


class KeyOptions(Struct, frozen=True, kw_only=True):
    """A server's options for its keys."""

    options: tuple[str, ...] = ()
    plugin_dir: str | None = None
    """A folder of plugins that the server must use, in spite of other options."""
    missing: str | None = None
    """Why the keys are missing, as text; a problem only if data are encrypted."""

    def among(self, options: Sequence[str]) -> tuple[str, ...]:
        """Return the user's options combined with these, in the right order: the last one wins."""
        return (*self.options, *options, *([f"--plugin-dir={self.plugin_dir}"] if self.plugin_dir else ()))


def provide_keys(
    binary: ServerBinary,
    copy: IsolatedCopy,
    originals: Originals,
    *,
    run_dir: str,
    owner: tuple[int, int],
    options: Sequence[str] = (),
) -> KeyOptions:
    """Return the options with which a server on a copy finds the keys of its source.

    Args:
        binary: the server's program.
        copy: from `snapmgr.mysql.datadir.copy.isolate_copy`.
        originals: see `snapmgr.mysql.server.throwaway`.
        run_dir: the server's own folder; it gets a folder with the configuration of MySQL's component.
        owner: uid and gid that the server runs as.
        options: the user's; they may name another folder of plugins, or the keys themselves.
    """
    if any(_MARIADB_PLUGIN in one.replace("-", "_") for one in options):
        return KeyOptions()
    plugins = plugin_folder(binary, options)
    files = _SourceFiles(copy, originals, owner)
    if binary.flavor == "mariadb":
        return _of_mariadb(copy.settings, plugins, files)
    return _of_mysql(binary, copy, plugins, files, run_dir)


class _SourceFiles:
    """Finds files of the source that the server's user can read."""

    def __init__(self, copy: IsolatedCopy, originals: Originals, owner: tuple[int, int]) -> None:
        self._covered = bool(copy.covers)
        self._originals = originals
        self._owner = owner

    def find(self, path: str) -> str | None:
        """Given a file of the source, return its path for us; None if it is not here, or the user may not read it."""
        for original, copy in self._originals.items():
            if lies_in(path, original):
                copied = os.path.join(copy, os.path.relpath(path, original))
                if os.path.isfile(copied):
                    return copied
        said = CommandRunner().run([*as_user(*self._owner), "test", "-f", path, "-a", "-r", path], ok=(0, 1))
        return path if said.returncode == 0 else None

    def path(self, path: str) -> str | None:
        """Given a file of the source, return its path as the server will see it; None as `find`."""
        found = self.find(path)
        return path if found is not None and self._covered else found

    def copy(self, path: str, target: str) -> None:
        """Copy a file from `find`; the user reads it, not root."""
        CommandRunner().run([*as_user(*self._owner), "install", "--mode=600", "--", path, target])


def _of_mariadb(settings: Mapping[str, str], plugins: str | None, files: _SourceFiles) -> KeyOptions:
    if f"{MARIADB_KEYS}filename" not in settings:
        return KeyOptions(missing=f"its source did not use the plugin {_MARIADB_PLUGIN}, or we could not ask it")
    if plugins is None or not os.path.isfile(os.path.join(plugins, f"{_MARIADB_PLUGIN}.so")):
        where = plugins or "the server's plugin folder"
        return KeyOptions(missing=f"the plugin {_MARIADB_PLUGIN} is not in {where} (Debian: package mariadb-server)")
    options = [f"--plugin-load-add={_MARIADB_PLUGIN}"]
    for name, value in settings.items():
        if name.startswith(MARIADB_KEYS):
            prefix = BY_FILE if value.startswith(BY_FILE) else ""
            file: str | None = value
            if prefix or name == f"{MARIADB_KEYS}filename":
                file = files.path(value.removeprefix(prefix))
                if file is None:
                    return KeyOptions(missing=f"the datadir's owner cannot read {value.removeprefix(prefix)} here")
            options.append(f"--{name.replace('_', '-')}={prefix}{file}")
    return KeyOptions(options=tuple(options))


def _of_mysql(
    binary: ServerBinary, copy: IsolatedCopy, plugins: str | None, files: _SourceFiles, run_dir: str
) -> KeyOptions:
    named = copy.settings.get(COMPONENT)
    if named not in (None, _MYSQL_COMPONENT):
        return KeyOptions(missing=f"its source used {named}; snapmgr supports only {_MYSQL_COMPONENT}")
    # The server reads the list of components to load beside its program, and nowhere else.
    manifest = os.path.join(os.path.dirname(os.path.realpath(binary.path)), "mysqld.my")
    config = _MYSQL_COMPONENT + ".cnf"
    loads = _json(manifest)
    if loads.get("read_local_manifest"):
        loads = _json(os.path.join(copy.home, "mysqld.my"))
    if _MYSQL_COMPONENT not in str(loads.get("components", "")):
        return KeyOptions(
            missing=f"{manifest} does not load {_MYSQL_COMPONENT}" + (", which its source did" if named else "")
        )
    if plugins is None or not os.path.isfile(os.path.join(plugins, f"{_MYSQL_COMPONENT}.so")):
        return KeyOptions(missing=f"{_MYSQL_COMPONENT} is not in {plugins or 'the plugin folder of the server'}")
    told = _json(os.path.join(plugins, config))
    if told.get("read_local_config"):
        told = _json(os.path.join(copy.home, config))
    rings = [ring for ring in (copy.settings.get(RING), told.get("path")) if isinstance(ring, str) and ring]
    found = next(filter(None, map(files.find, rings)), None)
    if found is None:
        why = f"the datadir's owner cannot read the keyring {rings[0]} here" if rings else f"{config} names no keyring"
        return KeyOptions(missing=why)
    return KeyOptions(plugin_dir=_own_plugins(run_dir, plugins, config, _own_ring(run_dir, files, found)))


def _own_ring(run_dir: str, files: _SourceFiles, ring: str) -> str:
    """Copy a keyring: a server that makes a new key writes to it, even if the component is set to "read_only"."""
    path = os.path.join(run_dir, "keyring")
    files.copy(ring, path)
    return path


def _own_plugins(run_dir: str, plugins: str, config: str, ring: str) -> str:
    """Make a plugin folder whose keyring is `ring`, and return it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    outer = os.open(run_dir, flags)
    try:
        os.mkdir(_PLUGINS, 0o755, dir_fd=outer)
        inner = os.open(_PLUGINS, flags, dir_fd=outer)
    finally:
        os.close(outer)
    try:
        os.fchmod(inner, 0o755)
        for name in os.listdir(plugins):
            if name != config:
                os.symlink(os.path.join(plugins, name), name, dir_fd=inner)
        fd = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=inner)
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            os.fchmod(fd, 0o644)
            json.dump({"path": ring, "read_only": False}, file, ensure_ascii=False)
    finally:
        os.close(inner)
    return os.path.join(run_dir, _PLUGINS)


def _json(path: str) -> dict[str, object]:
    """Return the object in a small JSON file; {} without a file or an object."""
    with suppress(OSError, ValueError), open_plain(path) as file:
        found = json.loads(file.read(_CONFIG_BYTES))
        if isinstance(found, dict):
            return found
    return {}
