"""The keys of encoder inputs, and the check that a stored output is what its request expects.

Owns: the namespace as the weights change, the cache of digests, the check of stored outputs. Does not own: the reaction
to a result (scheduler.py). Lookups run in the background thread. The step's thread reports changes of weights, and
takes the leases of claims.

Invariants
- From a change of weights until the daemon's confirmation, no input has a key.
- Weights that were changed in place get a name of their own that no other engine can have: the number of changes does
  not identify the new weights, and nothing else known here does.
- Keys are made at the namespace's present generation, not at that of the engine's start: the revision names the
  weights, and an engine that raised the generation has another revision since.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from ....errors import UnsupportedLeaf
from ....shm.ring.layout import NAMESPACE_TAG_BYTES
from ...arguments.namespace import Namespace
from ...core.client import Client
from ...identity.content import Digests
from ...reading.lease import Lease
from .claims import Wanted
from .stats import LookupCounts

RETRY_S: Final = 1.0
_log = logging.getLogger("tensord")


class Input:
    """An input of a request. Inputs with one identifier count as one input, as in the scheduler.

    The background thread writes `key`, then `lease`, and `state` last.
    """

    __slots__ = ("check", "datas", "key", "lease", "modality", "rows", "state", "wanted")

    def __init__(self, modality: str, rows: int, data: object) -> None:
        self.modality = modality
        self.rows = rows
        self.datas = [data]
        self.state: Literal["asked", "unshared", "found", "missed"] = "asked"
        self.key: bytes | None = None
        self.lease: Lease | None = None
        self.check: bool | None = None
        """Whether the input is encoded anyway and compared with the stored output; None: not decided yet."""
        self.wanted: Wanted | None = None


class Lookups:
    """The keys and lookups of one engine.

    Args:
        namespace: the namespace of the engine's outputs; None if they have no name.
        dtype: the name of the outputs' dtype in torch.
        width_fits: whether outputs of a modality may have a given number of columns.
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
        """Whether the engine can share any output."""
        return self._namespace is not None

    @property
    def confirmed(self) -> bool:
        """Whether the daemon has confirmed all changes of the weights."""
        return self._changes == self._changes_confirmed

    def weights_changed(self) -> None:
        """Records that stored outputs are another model's. The next lookup tells the daemon."""
        if not self._changes and self.named:
            _log.warning(
                "tensord: the model of this engine was changed in place, or may have been, so other engines cannot "
                "know its present weights. From now on it shares encoder outputs with no other engine, and finds only "
                "its own. To share again, restart it from files that have these weights"
            )
        self._changes += 1

    def trusts(self, key: bytes) -> bool:
        """Whether outputs in the key's namespace may be used and stored."""
        return key[:NAMESPACE_TAG_BYTES] not in self._distrusted

    def distrust(self, key: bytes, by: float) -> bool:
        """Ends sharing in the key's namespace: the entry `key` differs from the output that this engine encodes, by
        `by` (see `canary.difference`). False if sharing there has ended already."""
        if not self.trusts(key):
            return False
        self._distrusted |= {key[:NAMESPACE_TAG_BYTES]}
        _log.error(
            "tensord: WRONG OUTPUT FOUND. The entry %s differs from the output that this engine encodes: a row differs "
            "by %.2g of its norm. Its namespace is evicted, and this engine shares no output in it until it restarts. "
            "The engines that share the namespace differ in something that its name does not cover: compare their "
            "models, versions and settings, tell them apart by tensord.revision, and report it",
            *(key.hex(), by),
        )
        return True

    def take(self, found: Input, lease: Lease) -> bool:
        """Keeps the lease if the stored output is what the request expects. Otherwise the input can be neither found
        nor stored."""
        stored = lease.tree
        if (
            isinstance(stored, np.ndarray)
            and stored.ndim == 2
            and stored.shape[0] == found.rows
            and stored.dtype.name == self._dtype
            and self._width_fits(found.modality, stored.shape[1])
        ):
            found.lease = lease
            return True
        self._counts.add("mismatches")
        found.key = None
        return False

    # ---- the background thread

    def look_up(self, found: Input, client: Client) -> None:
        """Computes the input's key, and pins the entry stored under it."""
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
            # In any case: the step may be waiting for this state.
            found.state = state

    def _key(self, found: Input, client: Client) -> bytes | None:
        namespace = self._confirmed(client)
        if namespace is None:
            return None
        digest, *others = [self._digests.of(data) for data in found.datas]
        if any(other != digest for other in others):
            return None
        key = namespace.key("encoder", found.modality, digest)
        return key if self.trusts(key) else None

    def _confirmed(self, client: Client) -> Namespace | None:
        """The namespace of the present weights; None until the daemon has confirmed that they changed.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not confirm.
        """
        if self._namespace is None:
            return None
        changes = self._changes
        namespace = client.current(self._namespace)
        if changes != self._changes_confirmed:
            if time.monotonic() < self._retry_at:
                return None
            self._retry_at = time.monotonic() + RETRY_S
            # Entries stored under the old name between the change and its report were made by other weights.
            raised = client.invalidate(namespace)
            namespace = replace(raised, revision=f"{self._revision} changed={secrets.token_hex(16)}")
            self._namespace = namespace
            self._retry_at = 0.0
            self._changes_confirmed = changes
        return namespace
