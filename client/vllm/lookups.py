"""What an encoder input is called, and whether what is stored under that name is what its request expects.

Owns: the namespace as the weights change, the digests that are known, the check of what is found. Does not own what is
done about it: that is the scheduler's side. Looking up is the background thread's; the step's thread says that the
weights have changed, and takes what claims bring.

Invariants
- Between a change of weights and the daemon's confirmation of it, nothing has a name.
- Weights that were changed in place have a name of their own, which no other engine can come to: the number of changes
  does not say what the weights are now, and nothing else here does.
- Keys are made at the generation that the namespace has now, not at the one that it had at the engine's start: the
  revision names the weights, and an engine that raised the generation has left the revision.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from ...errors import UnsupportedLeaf
from ...shm.layout import NAMESPACE_TAG_BYTES
from ..core.cache import Client
from ..core.lease import Lease
from ..core.namespace import Namespace
from ..identity.content import Digests
from ..identity.engine import with_adapter
from .claims import Wanted
from .stats import LookupCounts

RETRY_S: Final = 1.0
_log = logging.getLogger("tensord")


class Input:
    """An input of a request, or several that the scheduler takes for one: those with one identifier.

    Written by the background thread: `key`, `lease`, and last `state`.
    """

    __slots__ = ("adapter", "check", "datas", "key", "lease", "modality", "rows", "state", "wanted")

    def __init__(self, modality: str, rows: int, data: object, adapter: tuple[int, str] | None = None) -> None:
        self.modality = modality
        self.rows = rows
        self.datas = [data]
        self.adapter = adapter
        """The LoRA adapter that it is encoded with: its number in vLLM, and the digest of its weights."""
        self.state: Literal["asked", "unshared", "found", "missed"] = "asked"
        self.key: bytes | None = None
        self.lease: Lease | None = None
        self.check: bool | None = None
        """Whether it is encoded all the same and compared; None: not decided."""
        self.wanted: Wanted | None = None


class Lookups:
    """Args:
    namespace: of the engine's outputs; None where they have no name.
    dtype: of the outputs, as torch names it.
    width_fits: whether outputs of a modality may have so many columns.
    """

    def __init__(
        self, namespace: Namespace | None, dtype: str, width_fits: Callable[[str, int], bool], counts: LookupCounts
    ) -> None:
        self._namespace = namespace
        self._revision = namespace.revision if namespace is not None else ""
        self._dtype = dtype
        self._width_fits = width_fits
        self._counts = counts
        self._digests = Digests()
        self._changes = self._changes_confirmed = 0
        self._retry_at = 0.0
        self._distrusted: frozenset[bytes] = frozenset()

    # ---- the step's thread

    @property
    def named(self) -> bool:
        """Whether anything can be shared at all."""
        return self._namespace is not None

    @property
    def confirmed(self) -> bool:
        """Whether the daemon knows of all changes of the weights."""
        return self._changes == self._changes_confirmed

    def weights_changed(self) -> None:
        """What was stored is another model's. The daemon is told when next something is looked up."""
        if not self._changes and self.named:
            _log.warning(
                "tensord: the model of this engine was changed in place, or its encoder cache was reset: no other "
                "engine can tell what it is now. It shares encoder outputs with none from here on, and finds only "
                "its own. To share again, start it anew from files that have these weights"
            )
        self._changes += 1

    def trusts(self, key: bytes) -> bool:
        """Whether anything may be found, or stored, in the key's namespace."""
        return key[:NAMESPACE_TAG_BYTES] not in self._distrusted

    def distrust(self, key: bytes, by: float) -> bool:
        """What was found under `key` is not what this engine encodes, but differs `by` so much. Nothing of its
        namespace is shared from now on. False where that was known.
        """
        if not self.trusts(key):
            return False
        self._distrusted |= {key[:NAMESPACE_TAG_BYTES]}
        _log.error(
            "tensord: WRONG OUTPUT FOUND. The entry %s is not what this engine encodes: a row differs by %.2g of its "
            "norm. Its namespace is evicted, and this engine shares nothing in it until it is started anew. The "
            "engines that share it differ in something that its name does not cover: compare their models, versions "
            "and settings, tell them apart by tensord.revision, and report it",
            *(key.hex(), by),
        )
        return True

    def take(self, found: Input, lease: Lease) -> bool:
        """Takes the lease if what is stored is what the request expects. What is not cannot be stored anew either."""
        wrong = self._mismatch(found, lease.tree)
        if wrong is None:
            found.lease = lease
            return True
        self._counts.add("mismatches")
        self._counts.add(f"mismatch_{wrong}")
        found.key = None
        return False

    def _mismatch(self, found: Input, stored: Any) -> str | None:
        """In what a stored output is not what the request expects; None if it is."""
        if not isinstance(stored, np.ndarray) or stored.ndim != 2:
            return "form"
        if stored.shape[0] != found.rows:
            return "rows"
        if stored.dtype.name != self._dtype:
            return "dtype"
        return None if self._width_fits(found.modality, stored.shape[1]) else "width"

    # ---- the background thread

    def look_up(self, found: Input, client: Client) -> None:
        """Finds out the input's key, and holds what is stored under it."""
        state: Literal["unshared", "found", "missed"] = "unshared"
        try:
            key = self._key(found, client)
            if key is None:
                self._counts.add("unshared")
                return
            found.key = key
            lease = client.get(key)
            if lease is None:
                state = "missed"
            elif self.take(found, lease):
                state = "found"
        except UnsupportedLeaf:
            self._counts.add("unshared")
        finally:
            # Whatever happened: the step may be waiting for it.
            found.state = state

    def _key(self, found: Input, client: Client) -> bytes | None:
        namespace = self._confirmed(client)
        if namespace is None:
            return None
        if found.adapter is not None:
            namespace = with_adapter(namespace, found.adapter[1])
        digest, *others = [self._digests.of(data) for data in found.datas]
        if any(other != digest for other in others):
            return None
        key = namespace.key("encoder", found.modality, digest)
        return key if self.trusts(key) else None

    def _confirmed(self, client: Client) -> Namespace | None:
        """The namespace of the weights as they are; None until the daemon has confirmed that they have changed.

        Raises:
            DaemonUnavailable, TimedOut: it has not.
        """
        if self._namespace is None:
            return None
        changes = self._changes
        namespace = client.current(self._namespace)
        if changes != self._changes_confirmed:
            if time.monotonic() < self._retry_at:
                return None
            self._retry_at = time.monotonic() + RETRY_S
            # What was stored under the old name between the change and its being told was made by other weights.
            raised = client.invalidate(namespace)
            namespace = replace(raised, revision=f"{self._revision} changed={secrets.token_hex(16)}")
            self._namespace = namespace
            self._retry_at = 0.0
            self._changes_confirmed = changes
        return namespace
