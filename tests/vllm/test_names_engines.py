"""Two real engines that differ in one thing: what one of them has encoded, the other never answers with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon_process import Daemon, until
from .conftest import StartEngine, encoding, fresh, keys
from .engine import Engine
from .tiny_llava import WIDE, write_tiny_llava


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


def shares(running: Daemon, first: Engine, second: Engine) -> bool:
    """Whether the second engine answers with what the first has encoded."""
    picture = fresh()
    for engine in (first, second):
        engine.generate()  # it is up, and its connector's client attached or about to be
    with encoding(first) as by_first, encoding(second) as by_second:
        there = keys(running)
        first.generate(picture)
        until(lambda: keys(running) - there, "what was encoded is stored")
        second.generate(picture)
        assert by_first() == 1
        return by_second() == 0


def test_engines_of_two_checkpoints_that_differ_in_the_projector_alone_share_nothing(
    running: Daemon, start_engine: StartEngine, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        write_tiny_llava(folder, inner=WIDE, projector_seed=seed)
        assert (folder / "model.safetensors").stat().st_size > 64 << 20
    one, same, other = (start_engine(folder, socket=running.socket) for folder in folders)
    with one, same, other:
        assert shares(running, one, same), "two folders with one content"
        assert not shares(running, one, other)
