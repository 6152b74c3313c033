"""Fixtures that the tests of several parts share: a real daemon that serves, and a card of host memory."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tensord.client.link import absence
from tensord.testing import FakeCard

from .client.device.card import CARD, TOTAL_BYTES, card_folder
from .daemon_process import PATIENCE_S, Daemon

# How long an example takes says how busy the machine is.
settings.register_profile("on any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("on any machine")

# torch has no package for every Python. Modules that import it at their top are left out there; the others skip tests.
_TESTS = Path(__file__).parent
collect_ignore = (
    [] if find_spec("torch") else [path for path in _TESTS.rglob("test_*.py") if "\nimport torch\n" in path.read_text()]
)


def pytest_report_header() -> list[str]:
    """Says which tests are left out, and why."""
    left_out = ", ".join(str(path.relative_to(_TESTS)) for path in collect_ignore)
    return [f"torch is not installed; left out: {left_out}"] if left_out else []


# A shell that runs the tests in the background has them ignore Ctrl-C, and every program that they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, in an event loop of its own; `loop_factory` may be a fixture."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    loop_factory: Any = pyfuncitem.funcargs.get("loop_factory")
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="module", autouse=True)
def _collections_walk_only_what_the_module_makes() -> None:
    """Many tests ask for full collections, in a process that holds thousands of tests and whatever they imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_daemon_is_taken_for_away(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy one may be silent for a second, after which a client does as without it. Tests of that are elsewhere."""
    if request.path.parent.name in ("integration", "public"):
        for name in ("WORD_S", "AWAY_S"):
            monkeypatch.setattr(absence, name, PATIENCE_S)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with a ring of 16 MiB."""
    with Daemon() as running:
        yield running.start()


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """The same, for all tests of a file."""
    with Daemon() as running:
        yield running.start()


@pytest.fixture
def card() -> Iterator[FakeCard]:
    """A card of TOTAL_BYTES for tests of the device cache, in a folder of its own."""
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as opened:
        yield opened
