"""The code blocks of README.md and docs/ that need vLLM: Python runs as printed, and `vllm serve` takes its words."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..daemon_process import Daemon
from ..public.pages import ROOT, SERVES, VLLM, Block, blocks_of, commands
from .engine import PATIENCE_S

SERVE = re.compile(r"^(?:\w+=\S+ )*vllm serve ")
# What the tiny model and a small machine need, and a reader's does not.
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.mark.parametrize("block", blocks_of(VLLM), ids=lambda block: block.page)
def test_a_block_that_needs_vllm_runs_as_printed(block: Block, model: Path) -> None:
    with Daemon() as daemon:
        environ = {**os.environ, **SMALL, "TENSORD_SOCKET": str(daemon.start().socket)}
        program = f"MODEL = {str(model)!r}\n{block.text}print(llm.llm_engine.model_config.model)\n"
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert str(model) in ran.stdout.splitlines()


@pytest.mark.parametrize("block", blocks_of(SERVES), ids=lambda block: block.page)
def test_vllm_serve_takes_the_words_that_it_is_given(block: Block) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = [SERVE.sub("", command) for command in commands(block) if SERVE.match(command)]
    assert len(given) == 1
    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    parsed = parser.parse_args(shlex.split(given[0]))
    if "--ec-transfer-config" in given[0]:
        assert parsed.ec_transfer_config.ec_connector == "TensordECConnector"
    if "--kv-transfer-config" in given[0]:
        assert parsed.kv_transfer_config.kv_connector == "TensordKVConnector"
