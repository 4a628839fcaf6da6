"""The command line itself: what it imports, its help, its errors, pipes and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import click
import pytest

from snapmgr.catalog.manifest import encode
from snapmgr.catalog.store import Catalog
from snapmgr.cli import failures, signals
from snapmgr.cli.main import COMMANDS, cli, main
from snapmgr.cli.session import Session
from snapmgr.contract.errors import NotQuiescedError
from support.sample import manifest

DOCS = Path(__file__).parents[3] / "docs"
# Whatever a command may need must be imported when it is called, not before.
HEAVY = {"msgspec", "rich", "pymysql", "pyudev", "btrfsutil", "subprocess", "json"}
MODULES_AFTER = """
import sys
from snapmgr.cli.main import main
code = main(sys.argv[1:])
print(code, *sorted(sys.modules), file=sys.stderr)
"""


def _python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _imported(*arguments):
    done = _python(MODULES_AFTER, *arguments)
    code, *modules = done.stderr.splitlines()[-1].split()
    return int(code), set(modules)


# ---------------------------------------------------------------------------------------------------------- start-up


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["backup", "--help"], ["list", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code, modules = _imported(*arguments)
    assert code == 0
    assert not HEAVY & modules
    assert not {
        name
        for name in modules
        if name.startswith(("snapmgr.access", "snapmgr.backup", "snapmgr.config", "snapmgr.catalog.store"))
    }


@pytest.mark.usefixtures("catalog")
def test_list_imports_only_what_reads_the_state_directory(config):
    code, modules = _imported("--config", str(config), "list")
    assert code == 0
    assert not {"rich", "pymysql", "pyudev", "btrfsutil", "subprocess"} & modules
    # The measuring itself: what it needs is seen.
    assert "msgspec" in modules


def test_help_starts_within_three_times_of_importing_click():
    def seconds(*command):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        return time.perf_counter() - start

    seconds("-m", "snapmgr", "--help")
    # The best of several: what else the machine does only ever adds.
    ours = min(seconds("-m", "snapmgr", "--help") for _ in range(5))
    bare = min(seconds("-c", "import click") for _ in range(5))
    assert ours < 3 * bare


def test_list_of_a_thousand_snapshots_is_quick(run, tmp_path):
    Catalog(tmp_path / "state").make()
    for number in range(1000):
        one = manifest(number)
        folder = tmp_path / "state" / "snapshots" / one.id
        folder.mkdir()
        (folder / "manifest.json").write_bytes(encode(one))
    start = time.perf_counter()
    code, out, _ = run("list")
    assert time.perf_counter() - start < 2
    assert code == 0
    assert len(out.splitlines()) == 1001


# -------------------------------------------------------------------------------------------------------------- help


def _all_commands():
    found = []
    for name in COMMANDS:
        command = import_module(f"snapmgr.cli.{name}").command
        found.append((name, command))
        if isinstance(command, click.Group):
            found += [(f"{name} {inner}", command.commands[inner]) for inner in command.commands]
    return found


@pytest.mark.parametrize("name", ["", *(name for name, _ in _all_commands())])
def test_every_help_has_an_example(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    examples = capsys.readouterr().out.partition("Example")[2]
    assert re.search(rf"^ *snapmgr .*{name}" if name else "^ *snapmgr ", examples, re.MULTILINE)


def test_the_list_of_commands_says_what_the_commands_say():
    for name, text in COMMANDS.items():
        command = import_module(f"snapmgr.cli.{name}").command
        assert command.help.split("\n\n")[0].replace("\n", " ") == text, name


def test_every_command_and_option_is_documented():
    documented = (DOCS / "reference" / "commands.md").read_text()
    for name, command in [("", cli), *_all_commands()]:
        assert name.partition(" ")[2] in documented
        assert not name or f"\n## {name.partition(' ')[0]}\n" in documented or ", umount" in documented
        for parameter in command.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else []:
                assert re.search(rf"{re.escape(option)}\b", documented), f"{name} {option}"


def test_no_command_is_help_on_stderr(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Commands:" in captured.err


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lst"], "Did you mean list?"),
        (["list", "--nonsense"], "No such option"),
        (["list", "--nonsense"], "see: snapmgr list --help"),
        (["list", "--quiet"], "put it before the command: snapmgr --quiet"),
        (["backup"], "Name at least one job, or give --all"),
        (["backup", "nightly", "--all"], "not both"),
        (["backup", "nigthly"], "did you mean nightly?"),
        (["mount"], "Missing argument 'ID'"),
        (["umount"], "Name mounts"),
        (["umount", ""], "cannot be empty"),
        (["mount", "latest", "--for", "2"], "is not a duration"),
        (["mount", "latest", "--for", "0"], "more than 0"),
        (["verify", "latest", "--tables", "0%"], "more than 0"),
        (["list", "other"], "there is no job 'other'"),
        (["-q", "-v", "list"], "cannot be combined"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(config, capsys, arguments, says):
    assert main(["--config", str(config), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("snapmgr: error: ")
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_a_missing_configuration_is_exit_code_2_with_a_hint(tmp_path, capsys):
    assert main(["--config", str(tmp_path / "none.toml"), "list"]) == 2
    assert "snapmgr config init" in capsys.readouterr().err


def test_errors_come_as_json_too(run):
    code, out, err = run("show", "latest", "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == document["error"]["exit_code"] == 1
    assert document["error"]["message"] in err


def test_debug_shows_the_traceback_of_a_foreseen_error(run):
    assert "Traceback" not in run("show", "latest")[2]
    assert "Traceback" in run("show", "latest", options=("--debug",))[2]


def test_a_bug_is_exit_code_1_with_a_traceback_without_values(run, monkeypatch):
    def broken(_session):
        secret = "".join(reversed("2retnuh"))
        raise TypeError(len(secret))

    monkeypatch.setattr(Session, "catalog", broken)
    code, out, err = run("list", "--json")
    assert code == json.loads(out)["exit_code"] == 1
    assert "this is a bug in snapmgr" in err
    assert "in broken" in err
    assert "hunter2" not in err


def test_a_full_disk_is_no_bug(run, monkeypatch):
    def full(_session):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Session, "catalog", full)
    code, _, err = run("list")
    assert code == 1
    assert "No space left" in err
    assert "bug" not in err
    assert "Traceback" not in err


def test_a_broken_pipe_in_the_work_is_never_silent(run, monkeypatch):
    def broken(_session):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(Session, "catalog", broken)
    code, _, err = run("list")
    assert code == 1
    assert "Broken pipe" in err


def test_foreseen_prints_a_traceback_for_bugs_only(capsys):
    session = Session()
    assert failures.foreseen(session, NotQuiescedError("no")).exit_code == 4
    assert capsys.readouterr().err == ""
    assert failures.foreseen(session, KeyError("x")).exit_code == 1
    assert "KeyError: 'x'" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal(run, catalog):
    reason = "gone \x1b[31m\x9b2J\u202eevil\n\x07next"
    catalog.write(manifest(9, state="broken", reason=reason))
    for arguments in (["list"], ["show", f"{9:08x}"], ["list", "--json"]):
        _, out, err = run(*arguments)
        assert "evil" in out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    assert json.loads(run("list", "--json")[1])["snapshots"][-1]["reason"] == reason
    # A new line in a name must not make a line that looks like ours.
    assert not any(line.startswith(("next", "\\x07next")) for line in run("list")[1].splitlines())


# ------------------------------------------------------------------------------------------- pipes, disks and signals


@pytest.mark.usefixtures("catalog")
def test_a_reader_that_goes_away_is_no_error(config):
    command = f'"{sys.executable}" -m snapmgr --config "{config}" list'
    for line in (f"{command} | true", f"{command} --json | head -c 1", f'"{sys.executable}" -m snapmgr --help | true'):
        script = f"{line}; echo ${{PIPESTATUS[0]}} >&2"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stderr == "0\n", line


@pytest.mark.usefixtures("catalog")
def test_a_result_that_cannot_be_written_is_a_failure(config):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "snapmgr", "--config", config, "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "snapmgr: error: cannot write the result to stdout: No space left on device\n"


@pytest.mark.usefixtures("catalog")
def test_closed_descriptors_are_not_taken_by_our_files(config):
    code = (
        "import os; from snapmgr.cli.output import prepare_streams; prepare_streams(); print(os.open('/', os.O_RDONLY))"
    )
    script = f'exec <&-; "{sys.executable}" -c "$0"'
    done = subprocess.run(["bash", "-c", script, code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 2
    # What flushes or writes there must not stumble, either.
    script = f'exec >&- 2>&-; "{sys.executable}" -c "$0"'
    prepared = "import sys; from snapmgr.cli.output import prepare_streams; prepare_streams(); "
    code = prepared + "sys.stdout.flush(); sys.stderr.write('x')"
    assert subprocess.run(["bash", "-c", script, code], check=False).returncode == 0
    closed = f'exec <&- >&- 2>&-; "{sys.executable}" -m snapmgr --config "{config}" list'
    assert subprocess.run(["bash", "-c", closed], check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_and_the_second_does_not_disturb(number, capfd):
    steps = []
    old = signal.getsignal(number)

    def work():
        try:
            os.kill(os.getpid(), number)
            steps.append("went on")
        finally:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("cleared up")

    with pytest.raises(signals.Interrupted, match=number.name), signals.ending_by_signal():
        work()
    assert steps == ["cleared up"]
    assert capfd.readouterr().err.count("cleaning up") == 2
    assert signal.getsignal(number) is old


def test_an_interruption_is_not_taken_for_a_failure():
    # Code that goes on after failures catches Exception or SnapmgrError.
    assert not issubclass(signals.Interrupted, Exception)


def test_ignored_signals_stay_ignored():
    code = """
import os, signal
from snapmgr.cli.signals import ending_by_signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with ending_by_signal():
    os.kill(os.getpid(), signal.SIGHUP)
print("alive")
"""
    assert _python(code).stdout == "alive\n"


def test_an_interrupted_command_is_exit_code_130(run, monkeypatch):
    def interrupted(_session):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Session, "catalog", interrupted)
    code, out, err = run("list", "--json")
    assert code == json.loads(out)["exit_code"] == 130
    assert "interrupted by SIGTERM" in err
    assert "Traceback" not in err
