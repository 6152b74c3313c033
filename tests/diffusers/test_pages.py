"""The code blocks of docs/ that need diffusers run as printed, with a tiny pipeline in the folder that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensord

from ..daemon_process import Daemon
from ..public.pages import DIFFUSERS, Block, blocks_of
from .pipelines import pipeline


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
