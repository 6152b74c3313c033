"""Engines on two hosts with one remote store: each a daemon of its own here, and a directory for the store."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensord

from ...daemon_process import Daemon
from .conftest import BLOCK_TOKENS, KVStand, StartEngine, asked, fresh_text, with_kv


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return f"dir://{tmp_path / 'store'}"


def test_an_engine_computes_only_its_own_suffix_of_a_prompt_that_another_host_has_computed(
    kv_model: Path, start_engine: StartEngine, url: str
) -> None:
    with Daemon(remote_url=url) as daemon, Daemon(remote_url=url) as other_daemon:
        daemon.start()
        other_daemon.start()
        with (
            start_engine(kv_model, **with_kv(daemon.socket)) as engine,
            start_engine(kv_model, **with_kv(other_daemon.socket)) as other,
            tensord.Client(daemon.socket) as client,
        ):
            engine.wait_up()
            other.wait_up()
            stand = KVStand(daemon, engine, other, engine)
            text = fresh_text()
            right, keys = stand.store(engine, text=text)
            # A second use has them written: computing them took a time that nobody knows.
            assert all(client.get(each) is not None for each in keys)
            daemon.until(lambda status: status["store"]["remote"].get("written") == len(keys), "blocks are written")
            answer, computed = asked(other, text=text)
            assert answer == right
            assert computed <= 2 * BLOCK_TOKENS
            assert other_daemon.status()["store"]["remote"]["fetched"] == len(keys)
            # Of what no host has computed, the store finds nothing, and no answer waits for it for long.
            new = fresh_text()
            assert other.generate(text=new) == engine.generate(text=new)
