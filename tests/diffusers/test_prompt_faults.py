"""cached_prompts without a daemon, with one that stops or dies, in forks and in processes that want one prompt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tensord
from tensord.client.diffusers import cached_prompts, tally

from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .pipelines import FLUX, SD, arguments, counts, pipeline, same


def test_without_a_daemon_every_call_encodes(tmp_path: Path) -> None:
    with tensord.Client(tmp_path / "none.sock", timeout_s=0.2) as client:
        shared = cached_prompts(pipeline(SD), client)
        for _ in range(2):
            assert same(shared.encode_prompt(**arguments(SD)), pipeline(SD).encode_prompt(**arguments(SD)))
        assert counts(shared) == (0, 2, 0)


def test_a_daemon_that_is_stopped_killed_and_started_again_costs_no_right_result() -> None:
    wanted = pipeline(SD).encode_prompt(**arguments(SD))
    with Daemon() as daemon:
        # What is stored first may take as long as it takes.
        first = cached_prompts(pipeline(SD), daemon.start().client(timeout_s=PATIENCE_S))
        assert same(first.encode_prompt(**arguments(SD)), wanted)
        client = daemon.client(timeout_s=0.3)
        shared = cached_prompts(pipeline(SD), client)
        daemon.until(lambda status: status["store"]["entries"] == 1, "the embeddings to be stored")
        daemon.pause()
        assert same(shared.encode_prompt(**arguments(SD)), wanted)
        assert counts(shared) == (1, 0, 0), "a hit needs no daemon"
        other = arguments(SD, prompt="a dog")
        assert same(shared.encode_prompt(**other), pipeline(SD).encode_prompt(**other))
        daemon.resume()
        daemon.kill()
        assert same(shared.encode_prompt(**arguments(SD)), wanted)
        until(lambda: not client.connected, "the client to notice the daemon's end")
        daemon.start()
        until(lambda: client.connected, "the client to attach again")
        found = tally(shared).found
        assert same(shared.encode_prompt(**arguments(SD)), wanted)
        assert tally(shared).found == found + 1


def test_what_another_program_stored_under_the_key_is_not_returned(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = cached_prompts(pipeline(SD), client)
    wanted = pipeline(SD).encode_prompt(**arguments(SD))
    monkeypatch.setattr(type(client), "get_or_compute", lambda self, key, compute: {"an": "other tree"})
    assert same(shared.encode_prompt(**arguments(SD)), wanted)
    assert counts(shared) == (0, 0, 1)


def encodes(stage: Stage, socket: Path) -> None:
    torch.set_num_threads(1)
    shared = cached_prompts(pipeline("FluxPipeline"), tensord.Client(socket, timeout_s=PATIENCE_S))
    stage.tell("ready")
    stage.hear()
    with torch.no_grad():
        found = shared.encode_prompt(**arguments("FluxPipeline"))
    stage.tell(([each.tolist() for each in found], counts(shared)))


def test_several_processes_that_want_one_prompt_at_once_encode_it_once(daemon: Daemon, client: tensord.Client) -> None:
    wanted = [each.tolist() for each in pipeline(FLUX).encode_prompt(**arguments(FLUX))]
    children = [Child(encodes, daemon.socket) for _ in range(3)]
    with children[0], children[1], children[2]:
        for child in children:
            assert child.hear(120) == "ready"
        for child in children:
            child.tell()
        heard = [child.hear() for child in children]
    assert all(found == wanted for found, _ in heard)
    assert sorted(counted for _, counted in heard) == [(0, 1, 0), (1, 0, 0), (1, 0, 0)]


def test_a_fork_shares_on_both_sides(client: tensord.Client) -> None:
    shared = cached_prompts(pipeline(SD), client)
    wanted = shared.encode_prompt(**arguments(SD))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if same(shared.encode_prompt(**arguments(SD)), wanted) and tally(shared).found == 1 else 1)
    assert same(shared.encode_prompt(**arguments(SD)), wanted)
    assert os.waitpid(pid, 0)[1] == 0
