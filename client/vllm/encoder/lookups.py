"""The keys of encoder inputs, and the check that a stored output is what its request expects.

Owns: the namespace and the end of sharing in it, the check of stored outputs. Does not own: the
reaction to a result (scheduler.py). Lookups run in the background thread. The step's thread ends sharing, and takes the
leases of claims.

Invariants
- Once sharing has ended, no input has a key.
- Keys are made at the namespace's present generation, not at that of the engine's start: the revision names the
  weights, and an engine that raised the generation shares nothing since.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ....errors import UnsupportedLeaf
from ...arguments.namespace import Namespace
from ...core.client import Client
from ...identity.content import digest_of_item, dtype_name
from ...identity.engine import Nameless, encoder_namespace
from ...reading.lease import Lease
from ..engine.settings import Settings
from .asking import Input, State
from .stats import LookupCounts

_log = logging.getLogger("tensord")


def namespace_of(vllm_config: Any, settings: Settings, does: str) -> Namespace | None:
    """The namespace of the engine's outputs; None if they have no name. Logs it, or why there is none. `does`: what the
    engine does with outputs there."""
    model = vllm_config.model_config.model
    try:
        namespace = encoder_namespace(vllm_config, revision=settings.revision, tenant=settings.tenant)
    except (Nameless, OSError) as error:
        _log.warning("tensord: the encoder of %s has no name, so no output is shared: %s", model, error)
        return None
    _log.info("tensord: encoder outputs of %s are %s in namespace %s", namespace.model, does, namespace.tag.hex())
    return namespace


class Lookups:
    """The keys and lookups of one engine. `namespace`: that of its outputs; None if they have no name."""

    def __init__(self, vllm_config: Any, namespace: Namespace | None, counts: LookupCounts) -> None:
        model = vllm_config.model_config
        self._namespace = namespace
        self._dtype = dtype_name(model.dtype)
        self._widths = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", {})
        self._hidden = model.get_inputs_embeds_size()
        self._counts = counts
        self.shares = namespace is not None
        """Whether the engine can share any output."""

    # ---- the step's thread

    def weights_changed(self) -> bool:
        """Ends sharing: stored outputs are another model's. False if it has ended already."""
        return self._end(
            logging.WARNING,
            "the model of this engine was changed in place, or may have been, so other engines cannot know its present "
            "weights. From now on it shares no encoder outputs. To share again, restart it from files that have these "
            "weights",
        )

    def differs(self, key: bytes, by: float) -> bool:
        """Ends sharing: the entry `key` differs from the output that this engine encodes, by `by` (see
        `canary.difference`). False if it has ended already."""
        return self._end(
            logging.ERROR,
            "WRONG OUTPUT FOUND. The entry %s differs from the output that this engine encodes: a row differs by %.2g "
            "of its norm. Its namespace is evicted, and this engine shares no output until it restarts. The engines "
            "that share the namespace differ in something that its name does not cover: compare their models, versions "
            "and settings, tell them apart by tensord.revision, and report it",
            *(key.hex(), by),
        )

    def _end(self, level: int, why: str, *about: object) -> bool:
        ends, self.shares = self.shares, False
        if ends:
            _log.log(level, f"tensord: {why}", *about)
        return ends

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

    def _width_fits(self, modality: str, width: int) -> bool:
        if modality in self._widths:
            return bool(width == self._widths[modality])
        # Encoders that return the outputs of several layers at once have a multiple of the model's width.
        return bool(width and width % self._hidden == 0)

    # ---- the background thread

    def look_up(self, found: Input, client: Client) -> None:
        """Computes the input's key, and pins the entry stored under it."""
        state: State = "unshared"
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
        if self._namespace is None or not self.shares:
            return None
        digest, *others = [digest_of_item(data) for data in found.datas]
        if any(other != digest for other in others):
            return None
        return client.current(self._namespace).key("encoder", found.modality, digest)

    def drop(self, client: Client) -> None:
        """Once sharing has ended, has the daemon drop what is stored, and refuse what is on its way.

        Raises:
            DaemonUnavailable, TimedOut: the daemon did not confirm.
        """
        if self._namespace is not None:
            client.invalidate(client.current(self._namespace))
