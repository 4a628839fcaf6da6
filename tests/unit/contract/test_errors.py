"""Exit codes are a promise to scripts: each error owns one, and of several the gravest wins."""

from __future__ import annotations

import inspect
import itertools

import pytest

from snapmgr.contract import errors
from snapmgr.contract.errors import SnapmgrError, gravest

CODES = {
    "SnapmgrError": 1,
    "StorageError": 1,
    "ShortOfSpaceError": 1,
    "AlteredError": 1,
    "LostError": 1,
    "CommandError": 1,
    "CatalogError": 1,
    "NoRoomError": 1,
    "NotFoundError": 1,
    "InUseError": 1,
    "ConfigError": 2,
    "BusyError": 3,
    "NotQuiescedError": 4,
    "LaterStepError": 5,
    "VerificationError": 6,
    "MissingRequirementError": 7,
    "InterruptedRunError": 130,
}
CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]


def test_every_error_is_in_the_one_tree_and_has_its_code():
    assert {cls.__name__: cls.exit_code for cls in CLASSES} == CODES
    assert all(issubclass(cls, SnapmgrError) for cls in CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_carries_message_and_hint(cls):
    error = cls("what failed", hint="what to do")
    assert (str(error), error.message, error.hint) == ("what failed", "what failed", "what to do")
    assert cls("only this").hint is None


def test_all_went_well():
    assert gravest([]) == 0
    assert gravest([0, 0]) == 0


def test_documented_order_of_several_jobs():
    order = [1, 4, 6, 5, 7, 3]
    for graver, lesser in itertools.combinations(order, 2):
        assert gravest([0, lesser, graver]) == graver
        assert gravest([graver, lesser, 0]) == graver


def test_interruption_and_usage_end_the_whole_run():
    assert gravest([1, 130, 4]) == 130
    assert gravest([1, 2, 7]) == 2


def test_unknown_code_counts_as_a_failure_and_never_as_success():
    assert gravest([0, 99]) == 99
    assert gravest([3, 99]) == 99


def test_readme_lists_every_code(pytestconfig):
    readme = (pytestconfig.rootpath / "README.md").read_text()
    for code in sorted({0, *CODES.values()}):
        assert f"| {code} |" in readme
