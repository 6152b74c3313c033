"""The code blocks of README.md and docs/ that need transformers run as printed."""

from __future__ import annotations

import pytest

import tensord

from ..daemon_process import Daemon
from ..public.pages import TRANSFORMERS, Block, blocks_of


@pytest.mark.parametrize("block", blocks_of(TRANSFORMERS), ids=lambda block: block.page)
def test_a_block_that_needs_transformers_runs_as_printed(
    block: Block,
    daemon: Daemon,
    client: tensord.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TENSORD_SOCKET", str(daemon.socket))
    block.run({})
    if "print(" in block.text:
        assert capsys.readouterr().out == "True EncoderTally(found=2, waited=0, encoded=2, passed=0)\n"
