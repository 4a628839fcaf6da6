"""Reads snapmgr.toml and conf.d beside it, and collects all errors in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from snapmgr.config import model
from snapmgr.config.files import list_files, read_toml
from snapmgr.config.model import Config, Job, Prepare, Retention, Verify
from snapmgr.config.values import attributes, describe_unknown, is_absolute, read_table, show
from snapmgr.contract.errors import ConfigError

DEFAULT_PATH = Path("/etc/snapmgr/snapmgr.toml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
_FOLDERS = ("state_dir", "scratch_dir")
_TOP_KEYS = (*_FOLDERS, "defaults", "job", "backend")
_NOT_KEYS = frozenset({"name"})
# Minimum and maximum in seconds. lock_wait_timeout has whole seconds, and 0 would fail at the first busy table.
_LIMITS = {
    "max_stall_s": ("1s", 1.0, "1h", 3600.0),
    "lock_hold_s": ("100ms", 0.1, "1h", 3600.0),
    "blocker_wait_s": ("0", 0.0, "1d", 86400.0),
    "blocker_age_s": ("100ms", 0.1, "1h", 3600.0),
    "kill_selects_after_s": ("1s", 1.0, "1d", 86400.0),
    "sync_target_s": ("1ms", 0.001, "1h", 3600.0),
    "settle_timeout_s": ("1s", 1.0, "7d", 604800.0),
    "time_limit_s": ("1s", 1.0, "7d", 604800.0),
    "max_age_s": ("1m", 60.0, "10y", 315360000.0),
    "grace_s": ("0", 0.0, "7d", 604800.0),
    "capacity_warn_within_s": ("0", 0.0, "1y", 31536000.0),
    "fill_limit_s": ("1m", 60.0, "30d", 2592000.0),
    "upload_delay_s": ("0", 0.0, "1d", 86400.0),
}
_LEAST_MEMORY_BYTES = 32 * 1024**2


def load_config(path: Path | None = None) -> Config:
    """Given the main file (default /etc/snapmgr/snapmgr.toml), return it together with ``conf.d/*.toml`` beside it.

    Raises ConfigError with one line for each error.
    """
    config, errors = _read(path or DEFAULT_PATH)
    if errors:
        raise ConfigError(
            "\n".join(errors), hint="nothing was done; correct it, then check it with `snapmgr config validate`"
        )
    return config


def default_config() -> Config:
    """Return the configuration of a machine without a file: no jobs, default folders."""
    reader = _Reader()
    return _made((), reader, {})


def validate(path: Path | None = None) -> list[str]:
    """Return one line for each error in the configuration: file, path of the key, value, allowed values."""
    return _read(path or DEFAULT_PATH)[1]


def _read(path: Path) -> tuple[Config, list[str]]:
    reader = _Reader()
    files = list_files(path, reader.errors)
    for file in files:
        reader.add(file)
    # Check the defaults even if no job uses them.
    reader.inherited()
    jobs = {name: job for name in reader.tables("job") if (job := reader.job(name)) is not None}
    return _made(tuple(files), reader, jobs), reader.errors


def _made(files: tuple[Path, ...], reader: _Reader, jobs: dict[str, Job]) -> Config:
    return Config(
        files=files,
        state_dir=reader.folder("state_dir") or _default_folder("/var/lib/snapmgr", "XDG_STATE_HOME", _home_state()),
        scratch_dir=reader.folder("scratch_dir")
        or _default_folder("/run/snapmgr", "XDG_RUNTIME_DIR", f"/tmp/snapmgr-{os.geteuid()}"),  # noqa: S108 - one per user; mount.py refuses a folder of another user
        jobs=jobs,
        backends={name: reader.found[f"backend.{name}"][1] for name in reader.tables("backend")},
    )


def _default_folder(for_root: str, variable: str, otherwise: str) -> Path:
    if os.geteuid() == 0:
        return Path(for_root)
    base = os.environ.get(variable, "")
    # XDG Base Directory Specification: relative paths are to be ignored.
    return Path(base) / "snapmgr" if base.startswith("/") else Path(otherwise)


def _home_state() -> str:
    return os.path.expanduser("~/.local/state/snapmgr")


class _Reader:
    """Collects the values of all files, each with the file it came from, and the errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.found: dict[str, tuple[Path, Any]] = {}
        self._defaults: dict[str, Any] | None = None

    def add(self, file: Path) -> None:
        """Read one file."""
        try:
            document = read_toml(file)
        except ConfigError as error:
            self.errors.append(error.message)
            return
        for key, value in document.items():
            if key not in _TOP_KEYS:
                self.errors.append(f"{file}: {key}: {describe_unknown(key, _TOP_KEYS)}")
            elif key in _FOLDERS:
                self._define(file, key, value)
            elif not isinstance(value, dict):
                self.errors.append(f"{file}: {key} = {show(value)}: must be a table")
            elif key == "defaults":
                self._define(file, key, value)
            else:
                for name, table in value.items():
                    self._add_named(file, key, name, table)

    def _add_named(self, file: Path, key: str, name: str, table: object) -> None:
        if not isinstance(table, dict):
            self.errors.append(f"{file}: {key}.{name} = {show(table)}: must be a table, [{key}.NAME]")
        elif not _NAME.fullmatch(name):
            self.errors.append(
                f"{file}: {key}.{show(name)}: a name has letters, digits, _ and -, begins with a letter or digit,"
                " and is at most 48 long"
            )
        elif key == "job" and name.lower() in model.RESERVED_JOB_NAMES:
            self.errors.append(
                f"{file}: job.{name}: this name has a special meaning on the command line; choose another"
            )
        else:
            self._define(file, f"{key}.{name}", table)

    def _define(self, file: Path, path: str, value: object) -> None:
        if path in self.found:
            self.errors.append(f"{file}: {path}: is defined in {self.found[path][0]} already; keep one of them")
        else:
            self.found[path] = (file, value)

    def tables(self, kind: str) -> list[str]:
        """Return the names of all ``[kind.NAME]``."""
        return [path.removeprefix(kind + ".") for path in self.found if path.startswith(kind + ".")]

    def folder(self, key: str) -> Path | None:
        """Return a top-level folder; None if it is not configured."""
        if key not in self.found:
            return None
        file, value = self.found[key]
        if isinstance(value, str) and is_absolute(value):
            return Path(value)
        self.errors.append(f"{file}: {key} = {show(value)}: must be an absolute path without ..")
        return None

    def _read_job_table(self, path: str) -> dict[str, Any]:
        """Return the typed values of ``defaults`` or a job, without the invalid ones."""
        file, table = self.found[path]
        errors: list[str] = []
        values = read_table(table, Job, path, errors, skip=_NOT_KEYS)
        errors += _check_limits(values, path, table)
        self.errors += [f"{file}: {error}" for error in errors]
        return values

    def inherited(self) -> dict[str, Any]:
        """Return the typed values of ``[defaults]``."""
        if self._defaults is None:
            self._defaults = self._read_job_table("defaults") if "defaults" in self.found else {}
        return self._defaults

    def job(self, name: str) -> Job | None:
        """Return one job with the defaults merged in; None if it has errors."""
        path = f"job.{name}"
        file, table = self.found[path]
        defaults = self.inherited()
        known = len(self.errors)
        own = self._read_job_table(path)
        source = own.get("source", None if "source" in table else defaults.get("source"))
        if source is None:
            if "source" not in table:
                self.errors.append(f'{file}: {path}.source: is missing; allowed are "mysql", "physical", "directory"')
            return None
        merged = _merge(_without_foreign(defaults, source, table), own)
        self.errors += [f"{file}: {error}" for error in _check_job(path, source, table, merged)]
        if len(self.errors) > known:
            return None
        merged["retention"] = Retention(**merged.get("retention", {}))
        merged["verify"] = Verify(**merged.get("verify", {}))
        merged["prepare"] = Prepare(**merged.get("prepare", {}))
        return Job(**merged, name=name)


def _attributes(kind: type[Job | Verify], keys: frozenset[str]) -> set[str]:
    return {name for key, name in attributes(kind).items() if key in keys}


def _foreign_keys(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys of a job and of its ``verify`` table that do not apply to this source."""
    job_keys, verify_keys = (
        frozenset(key for key, sources in keys.items() if source not in sources)
        for keys in (model.KEY_SOURCES, model.VERIFY_KEY_SOURCES)
    )
    return job_keys, verify_keys


def _without_foreign(defaults: dict[str, Any], source: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that apply to a job, without those for other sources."""
    job_keys, verify_keys = _foreign_keys(source)
    dropped = _attributes(Job, job_keys)
    # The job's own connection to the server replaces the inherited one.
    if "socket" in own or "defaults_file" in own:
        dropped |= {"socket", "defaults_file", "user"}
    kept = {key: value for key, value in defaults.items() if key not in dropped}
    if "verify" in kept:
        foreign = _attributes(Verify, verify_keys)
        kept["verify"] = {key: value for key, value in kept["verify"].items() if key not in foreign}
    return kept


def _merge(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return `defaults` overridden by `own`, key by key, also in the nested tables."""
    merged = defaults | own
    for key in ("retention", "verify", "prepare"):
        if key in defaults and key in own:
            merged[key] = defaults[key] | own[key]
    return merged


def _check_limits(values: dict[str, Any], where: str, written: dict[str, Any]) -> list[str]:
    """Return errors for typed values out of bounds; `written` is the table as the user wrote it."""
    errors = []
    verify = values.get("verify", {})
    nested = [(f"{where}.{key}", values.get(key, {}), written.get(key, {})) for key in ("verify", "prepare")]
    for path, table, raw in ((where, values, written), *nested):
        for name, (least_text, least, most_text, most) in _LIMITS.items():
            if name in table and not least <= table[name] <= most:
                key = name.removesuffix("_s")
                errors.append(f"{path}.{key} = {show(raw[key])}: must be between {least_text} and {most_text}")
    if verify.get("memory_bytes", _LEAST_MEMORY_BYTES) < _LEAST_MEMORY_BYTES:
        memory = show(written["verify"]["memory"])
        errors.append(f"{where}.verify.memory = {memory}: must be at least 32M: with less no server starts")
    steps = values.get("after_backup", ())
    if len(set(steps)) < len(steps):
        errors.append(f"{where}.after_backup = {show(steps)}: names a step twice")
    return errors


def _check_job(path: str, source: str, own: dict[str, Any], merged: dict[str, Any]) -> list[str]:
    """Return the errors in the combination of a job's keys. `own` is its table as written, `merged` is typed."""
    job_keys, verify_keys = _foreign_keys(source)
    own_verify = own["verify"] if isinstance(own.get("verify"), dict) else {}
    misplaced = [(f"{path}.{key}", model.KEY_SOURCES[key]) for key in own if key in job_keys]
    misplaced += [(f"{path}.verify.{key}", model.VERIFY_KEY_SOURCES[key]) for key in own_verify if key in verify_keys]
    errors = [
        f"{key}: applies only to source = {' or '.join(show(other) for other in sorted(others))}, "
        f'and this job has source = "{source}"'
        for key, others in misplaced
    ]
    # An invalid key has its own error, so it counts as present.
    present = set(own) | set(merged)
    if source == "mysql":
        return errors + _check_mysql(path, present, merged)
    if source == "physical":
        return errors + _check_physical(path, present, merged)
    if "path" not in present:
        errors.append(f'{path}.path: is missing; source = "directory" needs the directory\'s absolute path')
    wants_verify = "verify" in merged.get("after_backup", ())
    if wants_verify and "command" not in own_verify and not merged.get("verify", {}).get("command"):
        errors.append(f'{path}.verify.command: is missing; after_backup has "verify", and a directory needs a command')
    return errors


def _check_physical(path: str, present: set[str], merged: dict[str, Any]) -> list[str]:
    errors = _check_mysql(path, present, merged)
    if "staging" not in present:
        errors.append(f'{path}.staging: is missing; source = "physical" needs a folder on the storage for the backup')
    if merged.get("tool") == "clone" and merged.get("mode") == "incremental":
        errors.append(
            f'{path}.mode: "incremental" cannot be combined with tool = "clone", which makes only full copies'
        )
    return errors


def _check_mysql(path: str, present: set[str], merged: dict[str, Any]) -> list[str]:
    errors = []
    ways = {"socket", "defaults_file"} & present
    stopped = merged.get("quiesce") == "stopped"
    if len(ways) > 1:
        errors.append(f"{path}: has both socket and defaults_file; keep one (the defaults file can name the socket)")
    if not ways and not stopped:
        errors.append(f'{path}: needs socket = "/…/mysqld.sock" or defaults_file = "/…/my.cnf"')
    if "user" in present and "defaults_file" in ways:
        errors.append(f"{path}.user: needs socket; with defaults_file set the user in that file")
    if stopped and "datadir" not in present:
        errors.append(f'{path}.datadir: is missing; with quiesce = "stopped" the server cannot be asked for it')
    return errors
