"""cached_prompts without a daemon, with foreign entries, in processes that want one prompt, and as docs/ show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensord
from tensord.client.diffusers import cached_prompts

from ..daemon_process import PATIENCE_S, Daemon
from ..processes import Child, Stage
from ..public.pages import DIFFUSERS, Block, blocks_of
from ..transformers.conftest import patient
from ..transformers.vision_models import same
from .pipelines import FLUX, SD, arguments, counts, pipeline


def test_without_a_daemon_every_call_encodes(tmp_path: Path) -> None:
    with tensord.Client(tmp_path / "none.sock", timeout_s=0.2) as client:
        shared = cached_prompts(pipeline(SD), client)
        for _ in range(2):
            assert same(shared.encode_prompt(**arguments(SD)), pipeline(SD).encode_prompt(**arguments(SD)))
        assert counts(shared) == (0, 2, 0)


def test_what_another_program_stored_under_the_key_is_not_returned(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = cached_prompts(pipeline(SD), client)
    wanted = pipeline(SD).encode_prompt(**arguments(SD))
    monkeypatch.setattr(type(client), "get_or_compute", lambda self, key, compute: {"an": "other tree"})
    assert same(shared.encode_prompt(**arguments(SD)), wanted)
    assert counts(shared) == (0, 0, 1)


def encodes(stage: Stage, socket: Path) -> None:
    patient(pytest.MonkeyPatch())
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


@pytest.mark.parametrize("block", blocks_of(DIFFUSERS), ids=lambda block: block.page)
def test_a_block_that_needs_diffusers_runs_as_printed(
    block: Block,
    daemon: Daemon,
    client: tensord.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipeline("StableDiffusionPipeline").save_pretrained(tmp_path / "my-pipeline")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORD_SOCKET", str(daemon.socket))
    block.run({})
    assert "PromptTally(found=1, encoded=1, passed=0, reasons=Reasons())" in capsys.readouterr().out
