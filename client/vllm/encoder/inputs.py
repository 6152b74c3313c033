"""The inputs of requests: their keys, and the lookups of their outputs.

Owns: which inputs of a request still have to be encoded or loaded, and how far they are settled; the namespace, and the
end of sharing in it; the check of stored outputs. Does not own: the reaction to a result (scheduler.py). Lookups run in
the background thread, everything else in the step's thread.

Invariants
- Inputs of a request with one identifier are one input.
- Once sharing has ended, no input has a key.
- Keys are made at the namespace's present generation, not at that of the engine's start: the revision names the
  weights, and an engine that raised the generation shares nothing since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ....errors import UnsupportedLeaf
from ...arguments.namespace import Namespace
from ...caches.measures import Counts
from ...core.client import Client
from ...identity.content import digest_of_item, dtype_name
from ...identity.engine import Nameless, encoder_namespace
from ...reading.lease import Lease
from ..engine.settings import Settings
from .claims import Wanted

State = Literal["asked", "unshared", "found", "missed", "decided"]
"""decided: a missed input that the request waits for no longer."""

_log = logging.getLogger("tensord")


@dataclass(slots=True, eq=False)
class Input:
    """An input of a request. The background thread writes `key`, then `lease`, and `state` last; once `state` is
    "missed", the step's thread does. `key`: None in state "missed" if the stored output does not fit. `check`: whether
    the input is encoded anyway and compared with the stored output; None: not decided yet."""

    modality: str
    rows: int
    datas: list[object]
    state: State = "asked"
    key: bytes | None = None
    lease: Lease | None = None
    check: bool | None = None
    wanted: Wanted | None = None


@dataclass(slots=True, eq=False)
class Asking:
    """A request. `inputs`: those that still have to be encoded or loaded, by identifier. `count`: of all its inputs."""

    inputs: dict[str, Input]
    count: int
    settled: bool = False
    since: float = field(default_factory=time.monotonic)
    waits_since: float = 0.0

    def missed(self) -> list[Input]:
        """The inputs to claim or to wait for, in the order of their keys."""
        missed = [found for found in self.inputs.values() if found.state == "missed" and found.key and not found.lease]
        return sorted(missed, key=lambda found: found.key or b"")


def inputs_of(features: Iterable[Any]) -> dict[str, Input]:
    """The inputs of these features, by identifier."""
    inputs: dict[str, Input] = {}
    for feature in features:
        rows = feature.mm_position.get_num_embeds()
        known = inputs.setdefault(feature.identifier, Input(feature.modality, rows, [feature.data]))
        if known.datas[-1] is not feature.data or known.rows != rows:
            # Several inputs have one name. If their contents differ, none of them is shared.
            known.datas.append(feature.data if known.rows == rows else None)
    return inputs


class Lookups:
    """The keys and lookups of one engine. Logs its namespace, or why its outputs have no name.

    Args:
        does: what the engine does with outputs, for the log.
    """

    def __init__(self, vllm_config: Any, settings: Settings, does: str, counts: Counts) -> None:
        model = vllm_config.model_config
        self._dtype = dtype_name(model.dtype)
        self._widths = vllm_config.ec_transfer_config.mm_encoder_output_widths
        self._hidden = model.get_inputs_embeds_size()
        self._counts = counts
        self.namespace: Namespace | None = None
        try:
            self.namespace = encoder_namespace(vllm_config, revision=settings.revision, tenant=settings.tenant)
        except (Nameless, OSError) as error:
            _log.warning("tensord: the encoder of %s has no name, so no output is shared: %s", model.model, error)
        else:
            about = self.namespace.model, does, self.namespace.tag.hex()
            _log.info("tensord: encoder outputs of %s are %s in namespace %s", *about)
        self.shares = self.namespace is not None
        """Whether the engine can share any output."""

    def take(self, found: Input, lease: Lease) -> bool:
        """Keeps the lease if the stored output is what the request expects. Otherwise the input can be neither found
        nor stored."""
        stored = lease.tree
        if isinstance(stored, np.ndarray) and stored.ndim == 2:
            rows, width = stored.shape
            measured = self._widths.get(found.modality)
            # Encoders that return the outputs of several layers at once have a multiple of the model's width.
            fits = width == measured if measured is not None else width > 0 and width % self._hidden == 0
            if rows == found.rows and stored.dtype.name == self._dtype and fits:
                found.lease = lease
                return True
        self._counts.count("mismatches")
        found.key = None
        return False

    # ---- the background thread

    def look_up(self, found: Input, client: Client) -> None:
        """Computes the input's key, and pins the entry stored under it."""
        state: State = "unshared"
        try:
            found.key = self._key(found, client)
            if found.key is None:
                self._counts.count("unshared")
                return
            lease = client.get(found.key)
            if lease is None:
                state = "missed"
            elif self.take(found, lease):
                state = "found"
        finally:
            # In any case: the step may be waiting for this state.
            found.state = state

    def _key(self, found: Input, client: Client) -> bytes | None:
        if self.namespace is None or not self.shares:
            return None
        try:
            digest, *others = [digest_of_item(data) for data in found.datas]
        except UnsupportedLeaf:
            return None
        if any(other != digest for other in others):
            return None
        return client.current(self.namespace).key("encoder", found.modality, digest)

    def drop(self, client: Client) -> None:
        """Once sharing has ended, has the daemon drop what is stored, and refuse what is on its way. Raises
        TensordError if the daemon did not confirm."""
        if self.namespace is not None:
            client.invalidate(client.current(self.namespace))
