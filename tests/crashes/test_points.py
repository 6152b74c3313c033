"""Every function that a crash point names is there: a renamed one would silently be killed nowhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module

import pytest

from .points import CLIENT, DAEMON


def functions(module: str) -> Iterator[str]:
    """The qualified names of a module's functions and methods."""
    for name, found in vars(import_module(f"tensord.{module}")).items():
        if inspect.isfunction(found):
            yield name
        elif inspect.isclass(found):
            yield from (f"{name}.{each}" for each in vars(found) if inspect.isroutine(getattr(found, each, None)))


@pytest.mark.parametrize("pattern", [each for group in (DAEMON, CLIENT) for some in group.values() for each in some])
def test_the_functions_that_a_crash_point_names_are_there(pattern: str) -> None:
    module, _, name = pattern.partition(":")
    outer = name.partition(".<locals>")[0]
    assert any(fnmatchcase(each, outer) for each in functions(module)), pattern
