"""How a server on a copy gets at the keys of encrypted data.

Nothing secret is recorded or put on a command line: a key file is named by its path, and the datadir's owner, as whom
the source's server read it, must be able to read it here too. Root reads none.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.mysql.datadir.keys import BY_FILE, COMPONENT, MARIADB_KEYS, RING
from snapmgr.mysql.datadir.plainfile import open_plain
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


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """What a server is told of the keys."""

    options: tuple[str, ...] = ()
    plugin_dir: str | None = None
    """A folder of plugins that the server must use, whatever its options say."""
    missing: str | None = None
    """Why it has none, in words; nothing is amiss as long as nothing is encrypted."""

    def among(self, options: Sequence[str]) -> tuple[str, ...]:
        """Return the user's options with these at their places: the last one given wins."""
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
    """Let a server on a copy find the keys of its source.

    Args:
        binary: the server's program.
        copy: from `snapmgr.mysql.datadir.copy.isolate_copy`.
        originals: see `snapmgr.mysql.server.throwaway`.
        run_dir: the server's own folder; MySQL's component takes its configuration from a folder that is made in it.
        owner: uid and gid that the server runs as.
        options: the user's, which may name another folder of plugins, or the keys themselves.
    """
    if any(_MARIADB_PLUGIN in one.replace("-", "_") for one in options):
        return KeyOptions()
    given = [one.partition("=")[2] for one in options if one.startswith(("--plugin-dir=", "--plugin_dir="))]
    plugins = given[-1] if given else plugin_folder(binary)
    room = _SourceFiles(copy, originals, owner)
    if binary.flavor == "mariadb":
        return _of_mariadb(copy.settings, plugins, room)
    return _of_mysql(binary, copy, plugins, room, run_dir)


class _SourceFiles:
    """What the server's user can read, where the server will see it."""

    def __init__(self, copy: IsolatedCopy, originals: Originals, owner: tuple[int, int]) -> None:
        self._covered = bool(copy.covers)
        self._originals = originals
        self._owner = owner

    def find(self, path: str) -> str | None:
        """Given a file of the source, return where it is for us; None if it is not here, or not for the user."""
        for original, there in self._originals.items():
            if lies_in(path, original):
                copied = os.path.join(there, os.path.relpath(path, original))
                if os.path.isfile(copied):
                    return copied
        said = CommandRunner().run([*as_user(*self._owner), "test", "-f", path, "-a", "-r", path], ok=(0, 1))
        return path if said.returncode == 0 else None

    def path(self, path: str) -> str | None:
        """Return the same as the server will see it."""
        found = self.find(path)
        return path if found is not None and self._covered else found

    def lend(self, path: str, target: str) -> None:
        """Copy a file that was found; the user reads it, not root."""
        CommandRunner().run([*as_user(*self._owner), "install", "--mode=600", "--", path, target])


def _of_mariadb(settings: Mapping[str, str], plugins: str | None, room: _SourceFiles) -> KeyOptions:
    if f"{MARIADB_KEYS}filename" not in settings:
        return KeyOptions(missing=f"its source did not use the plugin {_MARIADB_PLUGIN}, or could not be asked")
    if plugins is None or not os.path.isfile(os.path.join(plugins, f"{_MARIADB_PLUGIN}.so")):
        where = plugins or "the server's folder of plugins"
        return KeyOptions(missing=f"the plugin {_MARIADB_PLUGIN} is not in {where} (Debian: package mariadb-server)")
    options = [f"--plugin-load-add={_MARIADB_PLUGIN}"]
    for name, value in settings.items():
        if name.startswith(MARIADB_KEYS):
            prefix = BY_FILE if value.startswith(BY_FILE) else ""
            told: str | None = value
            if prefix or name == f"{MARIADB_KEYS}filename":
                told = room.path(value.removeprefix(prefix))
                if told is None:
                    return KeyOptions(missing=f"the datadir's owner cannot read {value.removeprefix(prefix)} here")
            options.append(f"--{name.replace('_', '-')}={prefix}{told}")
    return KeyOptions(options=tuple(options))


def _of_mysql(
    binary: ServerBinary, copy: IsolatedCopy, plugins: str | None, room: _SourceFiles, run_dir: str
) -> KeyOptions:
    named = copy.settings.get(COMPONENT)
    if named not in (None, _MYSQL_COMPONENT):
        return KeyOptions(missing=f"its source used {named}; only {_MYSQL_COMPONENT} is passed on")
    # The server looks beside its program for what to load, and nowhere else.
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
        return KeyOptions(missing=f"{_MYSQL_COMPONENT} is not in {plugins or 'the folder of plugins of the server'}")
    told = _json(os.path.join(plugins, config))
    if told.get("read_local_config"):
        told = _json(os.path.join(copy.home, config))
    rings = [ring for ring in (copy.settings.get(RING), told.get("path")) if isinstance(ring, str) and ring]
    found = next(filter(None, map(room.find, rings)), None)
    if found is None:
        why = f"the datadir's owner cannot read the keyring {rings[0]} here" if rings else f"{config} names no keyring"
        return KeyOptions(missing=why)
    return KeyOptions(plugin_dir=_own_plugins(run_dir, plugins, config, _own_ring(run_dir, room, found)))


def _own_ring(run_dir: str, room: _SourceFiles, ring: str) -> str:
    """Copy a keyring: a server that makes a new key writes it there, even if the component is told "read_only"."""
    path = os.path.join(run_dir, "keyring")
    room.lend(ring, path)
    return path


def _own_plugins(run_dir: str, plugins: str, config: str, ring: str) -> str:
    """Make a folder of plugins whose keyring is `ring`, and return it."""
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
    """Return the object in a small JSON file; {} if there is none."""
    with suppress(OSError, ValueError), open_plain(path) as file:
        found = json.loads(file.read(_CONFIG_BYTES))
        if isinstance(found, dict):
            return found
    return {}
