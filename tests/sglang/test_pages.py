"""The code block of docs/sglang.md: SGLang takes the words of its command, and makes the storage that they name."""

from __future__ import annotations

import argparse
import shlex

from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.server_args import ServerArgs

from ..daemon_process import Daemon
from ..public.pages import SGLANG, blocks_of
from .rank import Rank

SERVER = "python -m sglang.launch_server "


def test_sglang_takes_the_command_of_the_page_and_makes_the_storage(daemon: Daemon) -> None:
    (block,) = blocks_of(SGLANG)
    words = block.text.replace("\\\n", " ").partition(SERVER)[2]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(shlex.split(words))
    assert given.enable_hierarchical_cache
    assert given.hicache_storage_backend == "dynamic"
    assert given.hicache_mem_layout == "page_first"
    extra, *_, passes_prefix_keys = HybridCacheController.parse_storage_backend_extra_config(
        given.hicache_storage_backend_extra_config
    )
    assert passes_prefix_keys
    Rank(daemon.socket, extra={**extra, "tensord.revision": "page"}).stored()
