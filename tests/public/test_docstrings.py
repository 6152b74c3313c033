"""Every public call has a docstring, every public class an example that runs, and a type checker sees their types.

The examples continue the lines of the package's own docstring, with a real daemon behind $TENSORD_SOCKET. pyright runs
from a folder of its own, as for a user, so that it finds tensord as an installed package; `make check` asks mypy.
"""

from __future__ import annotations

import doctest
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import tensord
from tensord.client.device.torch_device import TorchDevice
from tensord.testing.fake_card import FakeCard
from tensord.testing.fake_vram import FakeVram

from ..daemon_process import Daemon, until
from .pages import sees_a_gpu

# The classes of `tensord`, and those that its calls take or return from other modules of the documentation.
CLASSES = [
    *(found for name in tensord.__all__ if isinstance(found := getattr(tensord, name), type)),
    FakeCard,
    FakeVram,
    TorchDevice,
]
NEEDS_A_GPU = {TorchDevice}
FUNCTIONS = [found for name in tensord.__all__ if isinstance(found := getattr(tensord, name), FunctionType)]
PARSER = doctest.DocTestParser()


def calls_of(of: type[object]) -> Iterator[tuple[str, FunctionType]]:
    """The public functions, class methods and properties of a class that are written in this package."""
    for name in dir(of):
        found = inspect.getattr_static(of, name)
        call = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if not name.startswith("_") and isinstance(call, FunctionType) and call.__module__.startswith("tensord."):
            yield name, call


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a daemon that knows the device card0."""
    card = FakeCard(tmp_path_factory.mktemp("cards"), "card0", 1 << 20)
    with Daemon(gauges_device="file", gauges_file=card.gauge_file) as daemon:
        daemon.start()
        with tensord.Client(daemon.socket) as client:
            until(lambda: "card0" in client.modes(), "the card's gauge")
        yield daemon.socket


def test_every_public_call_has_a_docstring() -> None:
    assert [of.__name__ for of in FUNCTIONS if not of.__doc__] == []
    assert [f"{of.__name__}.{name}" for of in CLASSES for name, call in calls_of(of) if not call.__doc__] == []


@pytest.mark.parametrize("of", CLASSES, ids=lambda of: of.__name__)
def test_every_public_class_has_an_example_that_runs_as_printed(
    of: type[object], socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tensord.__doc__ and of.__doc__
    assert PARSER.get_examples(of.__doc__), f"the docstring of {of.__name__} has no example"
    if of in NEEDS_A_GPU and not sees_a_gpu():
        pytest.skip("the example needs a GPU")
    monkeypatch.setenv("TENSORD_SOCKET", str(socket))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    example = PARSER.get_doctest(f"{tensord.__doc__}\n{of.__doc__}", {}, of.__name__, None, 0)
    said: list[str] = []
    try:
        doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    finally:
        client: tensord.Client = example.globs["cache"]
        client.clear()
        client.close()
    assert not said, "".join(said)


USES = Path(__file__).with_name("typed_uses.py")
STRICT = {
    "typeCheckingMode": "strict",
    "include": [USES.name],
    "enableTypeIgnoreComments": False,
    "reportUnnecessaryTypeIgnoreComment": "error",
}
PATIENCE_S = 300.0


def test_pyright_strict_takes_right_uses_and_refuses_wrong_ones(tmp_path: Path) -> None:
    shutil.copy(USES, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(STRICT))
    command = [sys.executable, "-m", "pyright", f"--pythonpath={sys.executable}"]
    # It may not ask the network for a newer version.
    environ = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    said = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert said.returncode == 0, said.stdout + said.stderr
