"""The scheduler's side: which blocks are in the ring, which are pinned for a load, and which are to be stored.

Owns: pins, from a lookup until all workers are done with the load; the state of each request. Does not own: names of
blocks (keys.py), copies (worker.py), which blocks vLLM looks for and when it stores them.

The states of a chunk for one request:

    lookup ─┬→ miss ─→ sought in the daemon's remote store, with the chunks after it, once in a request
            └→ pinned ─┬→ loading: until each rank has reported the ticket
                       ├→ released: the request is scheduled without it, or has ended
                       └→ failed: not offered to this request again

Invariants
- A lookup says HIT only while every rank's part is pinned.
- Lookups read shared memory. The step's thread sends no message, and never waits for the daemon.
- After a change of the weights, nothing is looked up or stored until the engine restarts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ....ipc.messages import control as messages
from ...arguments.namespace import Namespace
from ...computing.remote_run import RemoteRun, RemoteRuns
from ...core.client import Client
from ...reading.lease import Lease
from ...reading.view import View
from ..engine.background import LATE_S, PAUSE_S, Background
from ..engine.weights import CHANGED, weights_are_kept
from .hints import AgentHints, hints_of
from .jobs import LoadChunks, StoreChunks, WorkerReport
from .keys import Chunks, Naming, RequestMedia

PINS_MAX: Final = 3072
"""Most entries pinned at once. A client's lane has 4096 words, which other parts of the engine use too."""
DAMAGED_MAX: Final = 4096
"""Keys of damaged entries that an engine remembers."""
Pinned = list[tuple[Lease, bytes]]
"""A chunk that is pinned: by rank, the lease of its part and the lease's handle."""
_log = logging.getLogger("tensord")


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """What the manager knows of a request.

    `naming`: None if the request shares nothing. `pinned`, `failed`: chunks that were found, and those whose load
    failed. `run`: what the daemon fetches for the request, or has fetched.
    """

    naming: Naming | None = None
    hints: AgentHints = field(default_factory=AgentHints)
    pinned: dict[OffloadKey, Pinned] = field(default_factory=dict)
    failed: set[OffloadKey] = field(default_factory=set)
    run: RemoteRun | None = None
    began_s: float = field(default_factory=time.monotonic)


class KVManager(OffloadingManager):  # type: ignore[misc, unused-ignore]
    """The manager of one engine. `stores`, `finds`: whether the engine stores blocks, and whether it looks for them."""

    def __init__(
        self, socket: str | None, client_name: str, namespace: Namespace, *, chunks: Chunks, stores: bool, finds: bool
    ) -> None:
        self._namespace = namespace
        self._chunks = chunks
        self._stores = stores
        self._finds = finds
        self._states: dict[str, RequestBlocks] = {}
        self._ending: set[str] = set()
        """Agents that end with their turn."""
        self._pins = 0
        self._tickets = 0
        self._loading: dict[int, tuple[int, list[OffloadKey], list[Pinned], RequestBlocks]] = {}
        """By ticket: ranks that have not reported, the chunks, their pins, and the request."""
        self._storing: set[OffloadKey] = set()
        self._damaged: dict[bytes, None] = {}
        self._changed = False
        self._reset = 0
        self._deferred = False
        self._runs = RemoteRuns()
        self._background = Background(socket, client_name, "tensord-vllm-kv")
        self._background.start()

    # ---- a request's life

    def begin(self, request: Any) -> None:
        """A new request of vLLM's."""
        hints = hints_of(request.kv_transfer_params, request.session_id)
        if hints.agent and not self._is_running(hints.agent):
            self._report_turn(hints.agent, "began")
        self._states[request.request_id] = RequestBlocks(self._naming(request), hints)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._states.pop(req_context.req_id, None)
        if state is None:
            return
        self._release(state)
        agent, ends = state.hints
        if ends:
            self._ending.add(agent)
        if agent and not self._is_running(agent):
            self._report_turn(agent, "finished" if agent in self._ending else "turn_ended")
            self._ending.discard(agent)

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """Releases what was pinned for these requests and is not loaded: they compute from here on."""
        if self._pins:
            for state in filter(None, map(self._states.get, request_ids)):
                self._release(state)

    def _is_running(self, agent: str) -> bool:
        """Whether a request of the agent runs here. A turn lasts from an agent's first request until none is left."""
        return any(state.hints.agent == agent for state in self._states.values())

    def _report_turn(self, agent: str, turn: Literal["began", "turn_ended", "finished"]) -> None:
        self._background.post(lambda client: client.link.ask(lambda number: messages.AgentTurn(number, agent, turn)))

    def _naming(self, request: Any) -> Naming | None:
        if request.lora_request is not None or request.prompt_embeds is not None or self._off:
            return None
        view = self._background.view
        features = sorted(request.mm_features or (), key=lambda feature: feature.mm_position.offset)
        media = RequestMedia([feature.mm_position.offset for feature in features])
        generation = view.current(self._namespace.tag) if view is not None else 0
        namespace = self._namespace.raised_to(max(generation, self._namespace.generation))
        items = [feature.data for feature in features]
        if items and (self._background.late or not self._background.post(lambda _: media.name(items))):
            media.settle([None] * len(items))
        return Naming(namespace, self._chunks, media, request.block_hashes)

    def _release(self, state: RequestBlocks) -> None:
        self._pins -= sum(map(len, state.pinned.values()))
        state.pinned.clear()

    # ---- lookups and loads

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = self._states.get(req_context.req_id)
        may_load = self._finds and req_context.load_tier_filter.allows(Medium.CPU, Locality.LOCAL)
        if state is None or state.naming is None or not may_load or self._off:
            return LookupResult.MISS
        if key in state.failed or key in state.pinned:
            return LookupResult.HIT if key in state.pinned else LookupResult.MISS
        end_token = req_context.get_offload_key_position(key)
        view = self._background.view
        if view is None or end_token is None or self._pins + self._chunks.ranks > PINS_MAX:
            return LookupResult.MISS
        media = state.naming.media
        if not media.settled and media.reach(end_token):
            if time.monotonic() - state.began_s > LATE_S:
                return LookupResult.MISS
            self._deferred = True
            return LookupResult.RETRY
        keys = state.naming.keys(key, end_token)
        found = self._pin(view, keys) if keys is not None else None
        if found is None:
            return LookupResult.RETRY if self._fetches(state, state.naming, key, end_token) else LookupResult.MISS
        state.pinned[key] = found
        self._pins += len(found)
        return LookupResult.HIT

    def _fetches(self, state: RequestBlocks, naming: Naming, key: OffloadKey, end_token: int) -> bool:
        """Whether the daemon fetches this missing chunk, and the ones after it, from its remote store."""
        client = self._background.client
        if state.run is None and client is not None and client.link.remote:
            run = self._runs.new(client.link, naming.keys_from(key, end_token))
            asked = not run.ended and self._background.post(lambda client: run.begin(client.link))
            state.run = run if asked else RemoteRun([])
        pending = state.run is not None and state.run.pending
        self._deferred |= pending
        return pending

    def _pin(self, view: View, keys: Sequence[bytes]) -> Pinned | None:
        """Pins all ranks' parts of a chunk. None if one of them is missing, or cannot be pinned."""
        found = []
        for key in keys:
            lease = view.get(key) if key not in self._damaged else None
            handle = lease.handle() if lease is not None else None
            if lease is None or handle is None:
                return None
            found.append((lease, handle))
        return found

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadChunks:
        """Hands pins over to a load. A chunk that is not pinned, which vLLM never asks for, fails in the worker."""
        wanted = list(keys)
        state = self._states.get(req_context.req_id) or RequestBlocks()
        missing: Pinned = []
        pinned = [state.pinned.pop(key, missing) for key in wanted]
        self._tickets += 1
        self._loading[self._tickets] = (self._chunks.ranks, wanted, pinned, state)
        handles = [[part[rank][1] if part else b"" for part in pinned] for rank in range(self._chunks.ranks)]
        self._release(state)
        return LoadChunks(self._tickets, self._group_counts(wanted), handles)

    def take_in(self, report: WorkerReport) -> None:
        """Processes the workers' reports on a step."""
        for ticket, positions in report.failed.items():
            loading = self._loading.get(ticket)
            if loading is not None:
                loading[3].failed.update(loading[1][position] for position in positions)
        for ticket, ranks in report.done.items():
            loading = self._loading.pop(ticket, None)
            if loading is None:
                continue
            left, keys, pinned, state = loading
            if left > ranks:
                self._loading[ticket] = (left - ranks, keys, pinned, state)
            else:
                self._pins -= sum(map(len, pinned))
        if report.damaged:
            self._distrust(report.damaged)

    def _distrust(self, keys: Collection[bytes]) -> None:
        """Entries that are not what they should be, which a worker has evicted. They are not offered to any request."""
        fresh = [key for key in keys if key not in self._damaged]
        if fresh:
            _log.error("tensord: %d stored KV blocks are damaged, the first is %s; evicted", len(fresh), fresh[0].hex())
        self._damaged.update(dict.fromkeys(fresh))
        while len(self._damaged) > DAMAGED_MAX:
            del self._damaged[next(iter(self._damaged))]

    # ---- stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Chooses the chunks that no engine has stored, and that this one is not storing."""
        state = self._states.get(req_context.req_id) or RequestBlocks()
        naming = state.naming
        chosen: list[OffloadKey] = []
        ranks = range(self._chunks.ranks)
        store = StoreChunks([], [[] for _ in ranks], [[] for _ in ranks], state.hints.agent)
        if naming is not None and self._stores and not self._off and self._background.connected:
            for key in keys:
                end_token = req_context.get_offload_key_position(key)
                names = naming.keys(key, end_token) if end_token is not None else None
                if names is None or end_token is None or key in self._storing or self._is_stored(names):
                    continue
                chosen.append(key)
                before = naming.before(key, end_token)
                for rank, name in enumerate(names):
                    self._damaged.pop(name, None)
                    store.keys[rank].append(name)
                    store.parents[rank].append(before[rank] if before is not None else b"")
        store.counts = self._group_counts(chosen)
        self._storing.update(chosen)
        return PrepareStoreOutput(chosen, store, [])

    def _is_stored(self, names: Sequence[bytes]) -> bool:
        """Whether all parts are stored, without known damage. The eviction of a damaged part may be on its way."""
        view = self._background.view
        return view is not None and all(name not in self._damaged and view.contains(name) for name in names)

    def _group_counts(self, keys: Iterable[OffloadKey]) -> list[int]:
        counts = Counter(map(get_offload_group_idx, keys))
        return [counts[group] for group in self._chunks.tokens]

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self._storing.difference_update(keys)

    # ---- changes

    def caches_reset(self, weights_kept: bool) -> None:
        """Ends sharing if the engine's weights were changed: they have no name any more."""
        if not weights_kept and not self._changed:
            self._changed = True
            _log.warning(CHANGED, "KV")

    def reset_cache(self) -> None:
        """Drops all stored KV of the namespace, for all engines. Nothing is shared until the daemon has done so.

        In a sleep or a pause of an engine whose weights are as they were, ends only what is in progress."""
        kept = weights_are_kept()
        self._storing.clear()
        for state in self._states.values():
            self._release(state)
            state.naming = state.naming if kept else None
        if not kept:
            self._reset += 1
            self._background.post_until_done(self._invalidate)

    def on_schedule_end(self, context: Any) -> None:
        if self._deferred:
            self._deferred = False
            time.sleep(PAUSE_S)

    def shutdown(self) -> None:
        """Releases everything and ends the thread. Idempotent."""
        for state in self._states.values():
            self._release(state)
        self._background.close()

    @property
    def _off(self) -> bool:
        return self._changed or self._reset > 0

    def _invalidate(self, client: Client) -> None:
        client.invalidate(client.current(self._namespace))
        self._reset -= 1
