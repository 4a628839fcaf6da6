"""The configuration: what is right is typed, what is wrong is named with file, key, value and what is allowed."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.config import load as load_module
from snapmgr.config.load import DEFAULT_PATH, load_config, validate
from snapmgr.config.model import Job, Prepare, Retention, Verify
from snapmgr.contract.errors import ConfigError, NotFoundError
from snapmgr.retention import Policy

MYSQL = '[job.db]\nsource = "mysql"\nsocket = "/run/mysqld/mysqld.sock"\n'
FILES = '[job.files]\nsource = "directory"\npath = "/srv"\n'
PHYSICAL = '[job.p]\nsource = "physical"\nsocket = "/run/mysqld/mysqld.sock"\nstaging = "/mnt/staging"\n'


def only_error(path):
    errors = validate(path)
    assert len(errors) == 1, errors
    return errors[0]


def test_the_least_mysql_job_has_the_documented_defaults(write):
    job = load_config(write(MYSQL)).job("db")
    assert job == Job(
        name="db",
        source="mysql",
        backend="auto",
        socket="/run/mysqld/mysqld.sock",
        quiesce="auto",
        max_stall_s=3.0,
        lock_attempts=5,
        lock_hold_s=10.0,
        sync_target_s=0.05,
        settle_timeout_s=300.0,
        retention=Retention(),
        after_backup=(),
        verify=Verify(check="quick", tables_share=1.0, time_limit_s=1800.0, memory_bytes=256 * 1024**2),
    )


def test_every_key_of_a_mysql_job_is_read(write):
    job = load_config(
        write("""
        [job.db]
        source = "mysql"
        backend = "btrfs"
        socket = "/run/mysqld/mysqld.sock"
        user = "backup"
        datadir = "/var/lib/mysql"
        quiesce = "global-read-lock"
        max_stall = "2s"
        lock_attempts = 7
        lock_hold = "1500ms"
        sync_target = "70ms"
        settle_timeout = "1h30m"
        after_backup = ["verify", "prune"]
        [job.db.retention]
        keep-last = 1
        keep-hourly = 2
        keep-daily = 3
        keep-weekly = 4
        keep-monthly = 5
        keep-yearly = 6
        keep-within = "2d"
        [job.db.verify]
        check = "extended"
        tables = "12.5%"
        assertions = ["SELECT 1"]
        time_limit = "10m"
        memory = "1G"
        server = "/opt/mariadbd"
        options = ["--innodb-buffer-pool-size-max=64M"]
        """)
    ).job("db")
    assert job == Job(
        name="db",
        source="mysql",
        backend="btrfs",
        socket="/run/mysqld/mysqld.sock",
        user="backup",
        datadir="/var/lib/mysql",
        quiesce="global-read-lock",
        max_stall_s=2.0,
        lock_attempts=7,
        lock_hold_s=1.5,
        sync_target_s=0.07,
        settle_timeout_s=5400.0,
        after_backup=("verify", "prune"),
        retention=Retention(
            keep_last=1,
            keep_hourly=2,
            keep_daily=3,
            keep_weekly=4,
            keep_monthly=5,
            keep_yearly=6,
            keep_within_s=172800.0,
        ),
        verify=Verify(
            check="extended",
            tables_share=0.125,
            assertions=("SELECT 1",),
            time_limit_s=600.0,
            memory_bytes=1024**3,
            server="/opt/mariadbd",
            options=("--innodb-buffer-pool-size-max=64M",),
        ),
    )


def test_retention_and_policy_have_the_same_attributes():
    assert Policy.__dataclass_fields__.keys() == set(Retention.__struct_fields__)


def test_the_defaults_are_merged_key_by_key_also_within_tables(write):
    config = load_config(
        write(
            '[defaults]\nlock_hold = "2s"\nretention = {keep-last = 3, keep-daily = 7}\n'
            'verify = {check = "none", command = ["true"], time_limit = "1m"}\n'
            + MYSQL
            + "retention.keep-daily = 14\nverify.memory = '64M'\n"
            + FILES
            + 'after_backup = ["verify"]\n'
        )
    )
    database, files = config.job("db"), config.job("files")
    assert (database.lock_hold_s, files.lock_hold_s) == (2.0, 10.0)
    assert database.retention == Retention(keep_last=3, keep_daily=14)
    assert files.retention == Retention(keep_last=3, keep_daily=7)
    # What is for the other source is left out of the defaults, not complained about.
    assert database.verify == Verify(check="none", memory_bytes=64 * 1024**2, time_limit_s=60.0)
    assert files.verify == Verify(command=("true",), time_limit_s=60.0)


def test_a_jobs_own_way_to_the_server_replaces_the_inherited_one(write):
    config = load_config(
        write(
            '[defaults]\nsource = "mysql"\nsocket = "/a.sock"\nuser = "u"\n'
            '[job.one]\n[job.two]\ndefaults_file = "/my.cnf"\n'
        )
    )
    assert (config.job("one").socket, config.job("one").user) == ("/a.sock", "u")
    assert config.job("two") == Job(name="two", source="mysql", defaults_file="/my.cnf")


def test_a_stopped_server_needs_its_datadir_and_no_connection(write):
    job = load_config(write('[job.db]\nsource = "mysql"\nquiesce = "stopped"\ndatadir = "/d"\n')).job("db")
    assert (job.socket, job.datadir) == (None, "/d")


@pytest.mark.parametrize(
    ("toml", "key", "said"),
    [
        ('[job.db]\nsource = "mysql"', "job.db", "needs socket"),
        (MYSQL + 'defaults_file = "/x"', "job.db", "both socket and defaults_file"),
        ('[job.db]\nsource = "mysql"\ndefaults_file = "/x"\nuser = "u"', "job.db.user", "needs socket"),
        ('[job.db]\nsource = "mysql"\nquiesce = "stopped"', "job.db.datadir", "is missing"),
        (MYSQL + 'path = "/x"', "job.db.path", 'applies only to source = "directory"'),
        (MYSQL + 'verify.command = ["x"]', "job.db.verify.command", 'applies only to source = "directory"'),
        (FILES + 'socket = "/x"', "job.files.socket", 'applies only to source = "mysql" or "physical"'),
        (FILES + 'verify.check = "quick"', "job.files.verify.check", 'applies only to source = "mysql" or "physical"'),
        (FILES + 'quiesce = "auto"', "job.files.quiesce", 'applies only to source = "mysql"'),
        (MYSQL + 'staging = "/x"', "job.db.staging", 'applies only to source = "physical"'),
        (PHYSICAL + 'max_stall = "3s"', "job.p.max_stall", 'applies only to source = "mysql"'),
        (PHYSICAL.replace("staging =", "#"), "job.p.staging", "is missing"),
        (PHYSICAL + 'path = "/x"', "job.p.path", 'applies only to source = "directory"'),
        (PHYSICAL + 'tool = "dump"', "job.p.tool", "allowed are"),
        (PHYSICAL + 'tool = "clone"\nmode = "incremental"', "job.p.mode", "makes only full copies"),
        (PHYSICAL + "parallel = 0", "job.p.parallel", ">= 1"),
        (PHYSICAL + 'prepare.upload_delay = "2d"', "job.p.prepare.upload_delay", "between"),
        (PHYSICAL + 'prepare.strategy = "best"', "job.p.prepare.strategy", "allowed are"),
        (FILES + 'after_backup = ["verify"]', "job.files.verify.command", "is missing"),
        ('[job.f]\nsource = "directory"', "job.f.path", "is missing"),
        ("[job.f]", "job.f.source", '"mysql", "physical", "directory"'),
        ('[job.f]\nsource = "postgres"', 'job.f.source = "postgres"', '"mysql", "physical", "directory"'),
        (MYSQL + 'quiesce = "hot"', 'job.db.quiesce = "hot"', '"backup-lock", "global-read-lock", "stopped"'),
        (MYSQL + "max_stall = 3", "job.db.max_stall = 3", '"30s"'),
        (MYSQL + 'max_stall = "3"', 'job.db.max_stall = "3"', "as in 250ms, 30s or 1h30m"),
        (MYSQL + 'max_stall = "500ms"', 'job.db.max_stall = "500ms"', "between 1s and 1h"),
        (MYSQL + 'lock_hold = "0"', 'job.db.lock_hold = "0"', "between 100ms and 1h"),
        (MYSQL + "lock_attempts = 0", "job.db.lock_attempts = 0", ">= 1"),
        (MYSQL + "lock_attempts = true", "job.db.lock_attempts = true", "a whole number"),
        (MYSQL + "lock_attempts = 2.0", "job.db.lock_attempts = 2.0", "a whole number"),
        (MYSQL + 'user = ""', 'job.db.user = ""', "length >= 1"),
        (MYSQL + 'datadir = "var/lib"', 'job.db.datadir = "var/lib"', "an absolute path"),
        (MYSQL + 'backend = "../evil"', 'job.db.backend = "../evil"', "matching"),
        (MYSQL + 'after_backup = "verify"', 'job.db.after_backup = "verify"', "a list"),
        (MYSQL + 'after_backup = ["push"]', "job.db.after_backup", '"verify", "prune"'),
        (MYSQL + 'after_backup = ["prune", "prune"]', "job.db.after_backup", "twice"),
        (MYSQL + "retention = 3", "job.db.retention = 3", "a table"),
        (MYSQL + "retention.keep-last = -1", "job.db.retention.keep-last = -1", ">= 0"),
        (MYSQL + "retention.keep_last = 1", "job.db.retention.keep_last", "did you mean 'keep-last'?"),
        (MYSQL + "retention.keep-within = 3", "job.db.retention.keep-within = 3", '"30s"'),
        (MYSQL + "lock_hodl = '1s'", "job.db.lock_hodl", "did you mean 'lock_hold'?"),
        (MYSQL + "lock-hold = '1s'", "job.db.lock-hold", "did you mean 'lock_hold'?"),
        (MYSQL + "name = 'x'", "job.db.name", "unknown key"),
        (MYSQL + "verify.tables = '0%'", 'job.db.verify.tables = "0%"', '"all"'),
        (MYSQL + "verify.tables = '101%'", 'job.db.verify.tables = "101%"', '"all"'),
        (MYSQL + "verify.tables = 20", "job.db.verify.tables = 20", '"20%"'),
        (MYSQL + "verify.memory = '1M'", 'job.db.verify.memory = "1M"', "at least 32M"),
        (MYSQL + "verify.memory = 1", "job.db.verify.memory = 1", '"256M"'),
        (MYSQL + "verify.time_limit = '1y'", 'job.db.verify.time_limit = "1y"', "between 1s and 7d"),
        (MYSQL + "verify.assertions = [1]", "job.db.verify.assertions = [1]", "a text"),
        ("[defaults]\nmax_stall = '1ms'", 'defaults.max_stall = "1ms"', "between 1s and 1h"),
        ("[jobs.db]", "jobs", "did you mean 'job'?"),
        ("job = 3", "job = 3", "a table"),
        ("[job]\ndb = 3", "job.db = 3", "[job.NAME]"),
        ("[job.latest]", "job.latest", "choose another"),
        ("[job.ALL]", "job.ALL", "choose another"),
        ('[job."a/b"]', 'job."a/b"', "letters, digits"),
        ('[job."a\\n"]', 'job."a\\n"', "letters, digits"),
        (f"[job.{'a' * 49}]", "job.", "at most 48"),
        ("state_dir = 'var'", 'state_dir = "var"', "an absolute path"),
        ("scratch_dir = 3", "scratch_dir = 3", "an absolute path"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_and_what_is_allowed(write, toml, key, said):
    path = write(toml)
    error = only_error(path)
    assert error.startswith(f"{path}: {key}")
    assert said in error


def test_all_errors_come_at_once_and_each_once(write):
    path = write(
        "[defaults]\nmax_stall = 1\n" + MYSQL + "lock_hold = 2\n[job.db2]\nsource = 'mysql'\n",
        extra=FILES + "paht = '/x'\n",
    )
    errors = validate(path)
    assert [error.partition(": ")[2].split()[0].rstrip(":") for error in errors] == [
        "defaults.max_stall",
        "job.db.lock_hold",
        "job.db2",
        "job.files.paht",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message.splitlines() == errors
    assert caught.value.exit_code == 2


def test_the_value_of_an_unknown_key_is_not_shown(write):
    assert "hunter2" not in only_error(write(MYSQL + 'password = "hunter2"'))


def test_a_key_that_is_wrong_is_not_reported_as_missing_too(write):
    assert "job.db.socket" in only_error(write('[job.db]\nsource = "mysql"\nsocket = "relative"'))
    assert "job.f.path" in only_error(write('[job.f]\nsource = "directory"\npath = 7'))


def test_a_job_defined_twice_names_both_files(write):
    path = write(MYSQL, again=MYSQL)
    error = only_error(path)
    assert str(path) in error
    assert str(path.parent / "conf.d/again.toml") in error
    assert "job.db" in error


@pytest.mark.parametrize("text", ["state_dir = '/a'", "[defaults]", "[backend.btrfs]"])
def test_other_things_defined_twice_are_errors_too(write, text):
    assert "defined in" in only_error(write(text, again=text))


def test_conf_d_is_read_in_order_and_only_toml_files(write):
    path = write(MYSQL, b=FILES, a='[job.first]\nsource = "directory"\npath = "/a"')
    for name in ("backup.toml.bak", ".#b.toml", "README"):
        (path.parent / "conf.d" / name).write_text("[job.db]\nthis is not even TOML")
    config = load_config(path)
    assert list(config.jobs) == ["db", "first", "files"]
    assert [file.name for file in config.files] == ["snapmgr.toml", "a.toml", "b.toml"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = = 2\n", "line 2"),
        ("a = 1\na = 1\n", "line 2"),
        ('x = """\nnever ends', "last line"),
        ("[job\n", "line 1"),
    ],
)
def test_a_toml_error_names_file_and_line(write, text, line):
    path = write(text)
    assert only_error(path).startswith(f"{path}, {line}: is not TOML: ")


def test_a_file_that_is_not_utf8_names_its_line(write):
    path = write("")
    path.write_bytes(b"a = 1\nb = '\xff'\n")
    assert only_error(path) == f"{path}, line 2: is not UTF-8"


def test_a_broken_file_hides_no_error_of_another(write):
    assert len(validate(write("= 1", other="[job.x]"))) == 2


def test_deep_nesting_is_an_error_and_no_crash(write):
    assert validate(write("a = " + "[" * 100_000))


def test_a_missing_main_file_says_how_to_make_one(tmp_path):
    assert "snapmgr config init" in only_error(tmp_path / "none.toml")


def test_the_default_is_in_etc(monkeypatch, tmp_path):
    monkeypatch.setattr(load_module, "DEFAULT_PATH", tmp_path / "x.toml")
    with pytest.raises(ConfigError, match=r"x\.toml: does not exist"):
        load_config()
    assert str(DEFAULT_PATH) == "/etc/snapmgr/snapmgr.toml"


def test_what_everybody_can_write_is_refused(write):
    path = write(MYSQL, more=FILES)
    assert validate(path) == []
    for culprit in (path, path.parent / "conf.d", path.parent / "conf.d/more.toml"):
        mode = culprit.stat().st_mode
        culprit.chmod(mode | 0o002)
        assert only_error(path).startswith(f"{culprit}: others may write to it")
        culprit.chmod(mode)


def test_an_unreadable_file_is_an_error(write, tmp_path):
    path = write(MYSQL)
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/gone.toml").symlink_to("nowhere")
    (tmp_path / "conf.d/folder.toml").mkdir()
    assert len(validate(path)) == 2


def test_backends_tables_are_passed_on_as_they_are(write):
    config = load_config(write("[backend.btrfs]\nfolder = '.snaps'\nkeep = [1, {a = 2}]"))
    assert config.backends == {"btrfs": {"folder": ".snaps", "keep": [1, {"a": 2}]}}


def test_folders_as_root_and_as_a_user(write, monkeypatch):
    path = write("")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    config = load_config(path)
    assert (str(config.state_dir), str(config.scratch_dir)) == ("/var/lib/snapmgr", "/run/snapmgr")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    config = load_config(path)
    assert (str(config.state_dir), str(config.scratch_dir)) == ("/home/u/.local/state/snapmgr", "/tmp/snapmgr-1000")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/r")
    config = load_config(path)
    assert (str(config.state_dir), str(config.scratch_dir)) == ("/s/snapmgr", "/r/snapmgr")
    config = load_config(write("state_dir = '/x'\nscratch_dir = '/y'"))
    assert (str(config.state_dir), str(config.scratch_dir)) == ("/x", "/y")


def test_an_unknown_job_names_the_nearest(write):
    config = load_config(write(MYSQL + FILES))
    with pytest.raises(NotFoundError) as caught:
        config.job("file")
    assert caught.value.hint == "did you mean files?"
    with pytest.raises(NotFoundError) as caught:
        config.job("zzz")
    assert caught.value.hint == "configured jobs: db, files"


toml_values = st.recursive(
    st.text(max_size=5)
    | st.sampled_from(["mysql", "directory", "physical", "/x", "1s"])
    | st.integers()
    | st.booleans()
    | st.floats()
    | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from([*Job.__struct_encode_fields__, "nonsense"])


@given(st.dictionaries(keys, toml_values, max_size=5), st.dictionaries(keys, toml_values, max_size=5))
def test_any_toml_gives_a_job_or_errors_and_never_a_crash(defaults, table):
    reader = load_module._Reader()
    for path, value in (("defaults", defaults), ("job.x", table)):
        reader._define(DEFAULT_PATH, path, value)
    job = reader.job("x")
    if job is None:
        assert reader.errors
    else:
        # A job without an error of its own is whole, whatever is wrong with the defaults.
        assert all("defaults" in error for error in reader.errors)
        assert job.source in {"mysql", "directory", "physical"}


def test_a_physical_job(write):
    config = load_config(
        write(
            "[defaults]\nprepare.writeback = true\n"
            + PHYSICAL
            + 'mode = "incremental"\nthrottle = "50M"\nprepare.cache_size = "4G"\nprepare.use_memory = "1G"\n'
        )
    )
    job = config.job("p")
    assert (job.staging, job.mode, job.throttle_bytes, job.tool) == ("/mnt/staging", "incremental", 50 << 20, "auto")
    assert job.prepare == Prepare(writeback=True, cache_size_bytes=4 << 30, use_memory_bytes=1 << 30)
