"""The code blocks of README.md and docs/ that need transformers run as printed."""

from __future__ import annotations

from typing import Final

import pytest

import tensord

from ..daemon_process import Daemon
from ..public.pages import TRANSFORMERS, blocks_of

PRINTED: Final = ["True EncoderTally(found=2, waited=0, encoded=2, passed=0)", "1000 1005"]
"""The output of the blocks that print, in their order."""


def test_the_blocks_that_need_transformers_run_as_printed(
    daemon: Daemon, client: tensord.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORD_SOCKET", str(daemon.socket))
    names: dict[str, object] = {}
    for block in blocks_of(TRANSFORMERS):
        block.run(names)
    assert capsys.readouterr().out.splitlines() == PRINTED
