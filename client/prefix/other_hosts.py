"""Blocks of a sequence that other hosts have computed: the daemon fetches them from its remote store.

Owns: which blocks of a sequence are asked for. Does not own: the match (cache.py), nor the runs (core/remote_run.py).

A block's key covers the form of the model's layers, which only a put tells. So a process finds blocks of other hosts
once it has put a sequence. Layers that are continued from snapshots are not fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...shm.prefix import Media, Tokens, fold, uncut
from ..core.remote_run import RemoteRuns
from .keys import chain_of

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.namespace import Namespace
    from .layers import Layers


class OtherHosts:
    """What other hosts have of the sequences of one namespace at one generation. Thread-safe."""

    def __init__(self, client: Client, namespace: Namespace, block_tokens: int) -> None:
        self._client = client
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._runs = RemoteRuns()
        self._digest: bytes | None = None

    def learn(self, layers: Layers) -> None:
        """Learns the form of the layers from a put."""
        self._digest = None if layers.exact else layers.digest

    def fetch(self, query: Tokens, media: tuple[Media, ...], offset: int, deadline: float) -> bool:
        """Has the daemon fetch the blocks behind the first `offset` tokens of a sequence. Returns whether more of it
        is in the ring then. Waits until `deadline` (monotonic seconds) at most."""
        link, digest = self._client.link, self._digest
        if not link.remote or digest is None or offset >= uncut(len(query) - 1, media):
            return False
        chain = chain_of(self._namespace, digest, False, fold(query, media), media, self._block_tokens)
        run = self._runs.new(link, [keyed.key for keyed in chain[offset // self._block_tokens :]])
        run.begin(link)
        run.wait(deadline)
        return run.count > 0
