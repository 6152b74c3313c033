"""Blocks of a sequence that other hosts have computed: the daemon fetches them from its remote store.

Owns: which blocks of a sequence are asked for, and the entry that tells other processes the form of the layers.

A block's key covers the form of the model's layers, which only a put tells. So whoever puts a sequence also stores an
entry with the digest of the form, under a key of the namespace and the size of blocks, and a process that has put
nothing asks for it. It goes to other hosts as any entry does. A process that has put a sequence goes by its own form.

Invariant: what the entry says is never trusted. A block is found under a key that covers the form, so a wrong form
finds nothing. Of two forms in one namespace, the entry has the one that a process has begun with last.

Layers that are continued from snapshots are not fetched.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from ...errors import TensordError
from ...ipc.messages import control as messages
from ...shm.index.keys import make_key
from ...shm.payloads.prefix import LAYOUT_BYTES, Media, Tokens, fold, uncut
from ..computing.remote_run import RemoteRuns
from .put import chain_of

if TYPE_CHECKING:
    from ..arguments.namespace import Namespace
    from ..core.client import Client
    from .layers import Layers

ASK_EVERY_S: Final = 1.0
"""How often a process that knows no form has the daemon ask for it."""


def form_key(namespace: Namespace, block_tokens: int) -> bytes:
    """The key of the entry with the form of a namespace's layers."""
    digest = hashlib.sha256(b"tensord prefix form" + block_tokens.to_bytes(4, "little")).digest()
    return make_key(namespace.tag, digest, namespace.generation)


class OtherHosts:
    """What other hosts have of the sequences of one namespace at one generation. Thread-safe."""

    def __init__(self, client: Client, namespace: Namespace, block_tokens: int) -> None:
        self._client = client
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._runs = RemoteRuns()
        self._key = form_key(namespace, block_tokens)
        self._ask_at = 0.0
        self._own: bytes | None = None
        """The form of this process's layers; b"" if they are not fetched, None before the first put."""
        self._told: bytes | None = None
        """The form that this process has put in place of another one."""

    def learn(self, layers: Layers) -> None:
        """Learns the form of the layers from a put."""
        self._own = b"" if layers.exact else layers.digest

    def tell(self, layers: Layers, cost_ms: float, deadline: float) -> None:
        """Stores the form of layers that were put, unless it is stored. `cost_ms`: of a block. Waits for room
        until `deadline` (monotonic seconds), and not for the outcome."""
        if layers.exact or not self._client.link.remote:
            return
        with suppress(TensordError):
            # The look at the entry counts as a use: it is evicted as late as the blocks, and written when they are.
            found = self._stored()
            if found == layers.digest or (found and self._told == layers.digest):
                return
            if self._told != layers.digest:
                # Something else may be in its place, here or in the store. The daemon takes records sooner than
                # messages, so the put waits for the answer.
                link = self._client.link
                evicted = link.ask(lambda number: messages.Evict(number, [self._key]))
                link.answers.within(evicted, min(link.silence.patience_s, max(0.0, deadline - time.monotonic())))
                self._told = layers.digest
            form, left_s = np.frombuffer(layers.digest, np.uint8), max(0.0, deadline - time.monotonic())
            self._client.put(self._key, form, cost_ms=cost_ms, timeout_s=left_s)

    def fetch(self, query: Tokens, media: tuple[Media, ...], offset: int, deadline: float) -> bool:
        """Has the daemon fetch the blocks behind the first `offset` tokens of a sequence. Returns whether more of it
        is in the ring then. Waits until `deadline` (monotonic seconds) at most."""
        link = self._client.link
        if not link.remote or offset >= uncut(len(query) - 1, media):
            return False
        form = self._form(deadline) if self._own is None else self._own
        if not form:
            return False
        chain = chain_of(self._namespace, form, False, fold(query, media), media, self._block_tokens)
        return self._fetched([keyed.key for keyed in chain[offset // self._block_tokens :]], deadline)

    def _form(self, deadline: float) -> bytes | None:
        """The form that a process of this host or another one has told."""
        found = self._stored()
        if found is None and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_EVERY_S
            if self._fetched([self._key], deadline):
                found = self._stored()
        return found

    def _fetched(self, keys: list[bytes], deadline: float) -> bool:
        run = self._runs.new(self._client.link, keys)
        run.begin(self._client.link)
        run.wait(deadline)
        return run.count > 0

    def _stored(self) -> bytes | None:
        """The form in the ring's entry; b"" if that is none, None without an entry."""
        lease = self._client.get(self._key)
        if lease is None:
            return None
        with lease, suppress(TensordError):
            found = lease.tree
            if isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.shape == (LAYOUT_BYTES,):
                return found.tobytes()
        return b""
