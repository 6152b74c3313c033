"""These tests need SGLang: `make test-sglang` installs the part of it that runs without a GPU, and runs them.

No engine runs. The host pools, their pages, the factory of storage backends and the hashes are SGLang's own; the pools
are filled by the tests, as an engine would from its GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..daemon_process import Daemon

if TYPE_CHECKING:
    from .rank import Rank

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
# SGLang looks for a GPU when it is imported.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session", autouse=True)
def stall_s() -> Iterator[None]:
    """On a busy machine a daemon that is well may take a second for a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensord.client.sglang.exchange.STALL_S", 3.0)
        yield


@pytest.fixture(scope="session")
def session_daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes="64MiB", gauges_host="none") as daemon:
        yield daemon


@pytest.fixture
def daemon(session_daemon: Daemon) -> Daemon:
    """A daemon that serves, whatever the test before did to it."""
    if session_daemon.running:
        session_daemon.resume()
    else:
        session_daemon.start()
    return session_daemon


@pytest.fixture(autouse=True)
def _ranks_are_closed() -> Iterator[None]:
    from . import rank

    yield
    while rank.made:
        rank.made.pop().storage.close()


@pytest.fixture
def ranks(daemon: Daemon) -> tuple[Rank, Rank]:
    """The same rank of two engines."""
    from .rank import Rank

    return Rank(daemon.socket), Rank(daemon.socket)


@pytest.fixture
def rank(ranks: tuple[Rank, Rank]) -> Rank:
    return ranks[0]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose single weight file belongs to the language model."""
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(folder: Path, changed: int = -1) -> Path:
    """Writes a model's folder: a configuration, and 1 MiB of weights of a decoder layer.

    Args:
        changed: the place of a byte that differs; -1: none.
    """
    data = bytearray(b"\x01" * (1 << 20))
    if changed >= 0:
        data[changed] ^= 0xFF
    about = {"model.layers.0.mlp.weight": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    header = json.dumps(about).encode()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder
