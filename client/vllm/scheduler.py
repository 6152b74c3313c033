"""The scheduler's side of the connector: decides which encoder inputs are loaded instead of encoded, and which engine
stores the others.

Owns: the state of each request's inputs, from the first time that the request may be scheduled until its end. Does not
own: keys and lookups (lookups.py), claims (claims.py). Only the step's thread uses this state, except for the results
that the background thread writes into an `Input`.

The states of one input, by the scheduler's calls:

    ensure    asked ─┬→ unshared          no name, so no lookup: encoded, not stored
                     ├→ found ──────────┐ the lease is held from here on
                     └→ missed          │
                          │ claims, in the order of the request's keys
                          ├→ found ─────┤ another engine has stored it meanwhile
                          └→ compute,   │
                             or alone   │
    alloc                 │             └→ load: the lease is held until all ranks are done with the step
                          └→ save: the claim is held until the output is stored
    preempted, aborted, finished, no longer needed: lease and claim are released in any state

Invariants
- `has` returns True only while the lease is held, and only for inputs of the request that was ensured last.
- A request asks for the claim of a key only once the claims of all its smaller keys are settled, so engines never wait
  for each other in a circle.
- Requests claim no more than one step takes; other engines may claim the rest. A request that has a claim may always
  ask for its next one, so two requests never block each other.
- An input that is in the engine's own encoder cache, according to the engine's calls, costs nothing.
- The step's thread never waits, hashes, or talks to the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from ...shm.layout import NAMESPACE_TAG_BYTES
from ..core import requests
from ..core.cache import Client
from ..core.lease import Lease
from ..core.namespace import Namespace
from .background import Background
from .canary import Canary
from .claims import EncodeClaims, Wanted
from .lookups import Input, Lookups
from .presence import Presence
from .stats import CONNECTED, LookupCounts, TensordECStats
from .step import NOTHING, Check, Load, Report, Save, StepMetadata

WAIT_S_LEAST: Final = 0.02
WAIT_FACTOR: Final = 3
"""An engine waits for another engine up to this multiple of the time that the other engine expected to take."""
SOONER: Final = 0.8
"""An engine does not wait if it would have encoded the input itself within this share of the other's remaining time."""
LOOK_UP_S: Final = 0.25
"""Seconds that lookups may take at least, even if `wait_s_max` is shorter."""
LAG_STEPS_MAX: Final = 256
"""Ranks run steps in order, and are at most a few steps behind. A rank that is this many steps behind is taken as done;
its report was lost."""
PAUSE_S: Final = 0.0001
ANSWER_S_MAX: Final = 30.0
UNSHARED_MODALITIES: Final = frozenset({"prompt_embeds"})
"""Inputs that the model receives as they are, without an encoder."""


class _Asking:
    """A request whose inputs are looked up. `inputs`: those that still have to be encoded or loaded, by identifier."""

    __slots__ = ("count", "end", "inputs", "order", "reached", "settled", "since", "waits_since")

    def __init__(self) -> None:
        self.inputs: dict[str, Input] = {}
        self.begin([])

    @property
    def claims(self) -> bool:
        """Whether the request has a claim, or waits for one, on an input that is not allocated yet."""
        return any(found.wanted is not None for found in self.inputs.values())

    def begin(self, features: Sequence[Any]) -> None:
        """Starts to settle the inputs in `features` from now on."""
        self.count = len(features)
        self.end = _end(features) if features else 0
        self.order: list[str] | None = None
        self.reached = 0
        self.settled = False
        self.since = time.monotonic()
        self.waits_since = 0.0


class SchedulerSide:
    """The scheduler's side.

    Args:
        client_name: the name that `tensorctl clients` shows.
        shares: what is shared, or why nothing is, for the first log line.
        namespace: the namespace of the engine's outputs; None shares nothing.
        ranks: the number of workers that load each input.
        width_fits: whether outputs of a modality may have a given number of columns.
        dtype: the name of the outputs' dtype in torch.
        canary: the share of hits that are encoded anyway and compared.
        step_requests, step_rows: the most requests, and the most rows of encoder outputs, in one step.
    """

    def __init__(
        self,
        socket: str | None,
        client_name: str,
        namespace: Namespace | None,
        *,
        shares: str,
        ranks: int,
        dtype: str,
        width_fits: Callable[[str, int], bool],
        wait_s_max: float,
        producer: bool,
        consumer: bool,
        tower_lora: bool,
        step_requests: int,
        step_rows: int,
        canary: float,
    ) -> None:
        self._ranks = ranks
        self._wait_s_max = wait_s_max
        self._producer = producer
        self._consumer = consumer
        self._tower_lora = tower_lora
        self._step_requests = step_requests
        self._step_rows = step_rows
        self._canary = Canary(canary)
        self._shares = shares
        self._presence: Presence | None = None
        self._connected_told: bool | None = None
        self._counts = LookupCounts()
        self._lookups = Lookups(namespace, dtype, width_fits, self._counts)
        # Requests, and the inputs that are in the engine's own encoder cache.
        self._asking: dict[str, _Asking] = {}
        self._current: _Asking | None = None
        self._local: set[str] = set()
        self._damaged: set[str] = set()
        self._unavailable: set[str] = set()
        # The step that is being made, and the steps in progress.
        self._step = 0
        self._allocated: set[str] = set()
        self._loads: dict[str, tuple[Lease, tuple[int, int]]] = {}
        self._saves: dict[str, Save] = {}
        self._checks: dict[str, tuple[bytes, Lease]] = {}
        self._in_flight: dict[int, tuple[list[Lease], set[int]]] = {}
        self._adapters: dict[int, dict[int, str]] = {}
        self._step_adapters: dict[str, tuple[int, str]] = {}
        self._rings: dict[int, bytes] = {}
        self._left: dict[int, set[bytes]] = {}
        self._deferred = False
        self._row_s: float | None = None
        self._rows = 0
        self._rows_wanted: int | None = None
        self._busy_until = 0.0
        self._background = Background(socket, client_name, "tensord-vllm-scheduler", self._tick, self._counts)
        self._claims = EncodeClaims(self._background, computes=producer)
        self._background.start()

    # ---- lookups for a request

    def ensure(self, request: Any, computed: int) -> bool:
        """Whether the request may be scheduled now. False defers it to a later step."""
        features = request.mm_features
        if self._damaged and any(feature.identifier in self._damaged for feature in features):
            self._unavailable.add(request.request_id)
            self._current = None
            return False
        asking = self._current = self._asking.get(request.request_id)
        if asking is None:
            if computed >= _end(features):
                return True
        elif computed >= asking.end and asking.count == len(features):
            if asking.inputs:
                self._release(asking)
            return True
        if asking is None or self._outdated(asking, features, computed):
            asking = self._begin(request, computed)
        if not asking.settled:
            asking.settled = self._settled(asking)
            self._deferred |= not asking.settled
        return asking.settled

    def has(self, identifier: str) -> bool:
        """Whether an input of the request that was ensured last is held here, and is to be loaded."""
        if self._current is None or not self._consumer:
            return False
        found = self._current.inputs.get(identifier)
        if found is None or found.lease is None or found.key is None:
            return False
        if found.check is None:
            found.check = self._canary.chooses(found.key)
        return not found.check

    def allocated(self, request: Any, index: int) -> None:
        """Records that the encoder cache has space for the input: it is loaded, or encoded, in the present step."""
        identifier = request.mm_features[index].identifier
        # A second allocation in one step: the first request was preempted, and may have had another input of this name.
        self._loads.pop(identifier, None)
        self._checks.pop(identifier, None)
        self._step_adapters.pop(identifier, None)
        undone = self._saves.pop(identifier, None)
        if undone is not None:
            self._claims.settled(undone.key)
        self._allocated.add(identifier)
        asking = self._asking.get(request.request_id)
        wanted = asking.inputs.pop(identifier, None) if asking is not None else None
        if wanted is not None and wanted.lease is not None and self._consumer and not wanted.check:
            self._counts.add("hits")
            self._loads[identifier] = wanted.lease, wanted.lease.tree.shape
        else:
            self._counts.add("misses")
            self._rows += request.mm_features[index].mm_position.get_num_embeds()
            if wanted is not None and wanted.lease is not None and wanted.key is not None and wanted.check:
                self._canary.compares(wanted.key)
                self._checks[identifier] = wanted.key, wanted.lease
            if wanted is not None and wanted.key is not None and self._stores(wanted):
                claim = self._claims.save(wanted.wanted) if wanted.wanted is not None else 0
                self._saves[identifier] = Save(wanted.key, wanted.rows, claim)
            if wanted is not None and wanted.adapter and (identifier in self._saves or identifier in self._checks):
                self._step_adapters[identifier] = wanted.adapter
        if wanted is not None:
            self._let_go(wanted, asking)

    def finished(self, request_id: str) -> None:
        """Releases everything that the request holds, however it ended."""
        asking = self._asking.pop(request_id, None)
        if asking is not None:
            self._release(asking)
            if self._current is asking:
                self._current = None
        self._unavailable.discard(request_id)

    def weights_changed(self) -> None:
        """Stops sharing until the daemon has confirmed a new generation, since stored outputs were made by other
        weights. The next lookup asks the daemon, so several calls for one change make one request."""
        self._lookups.weights_changed()
        for asking in self._asking.values():
            self._release(asking)
        self._claims.end_saves()
        self._local.clear()
        self._damaged.clear()

    def adapters_changed(self, held: dict[int, dict[int, str]]) -> None:
        """Receives the LoRA adapters that the workers hold: by rank, their digests by vLLM's number of the adapter."""
        self._adapters = held
        for asking in self._asking.values():
            if any(found.adapter and not self._holds(*found.adapter) for found in asking.inputs.values()):
                # It is looked up again under its new name.
                self._release(asking)

    # ---- the step's metadata

    def metadata(self, scheduler_output: Any) -> StepMetadata:
        """The metadata for the workers of the step that was just made."""
        if scheduler_output.free_encoder_mm_hashes:
            self._local.difference_update(scheduler_output.free_encoder_mm_hashes)
        if scheduler_output.total_num_scheduled_tokens or self._allocated:
            self._step += 1
        elif self._deferred:
            # No tokens are scheduled in this step, so the background thread gets the interpreter to settle the lookups.
            time.sleep(PAUSE_S)
        self._deferred = False
        if self._in_flight:
            self._drop_lost()
        rows, self._rows = self._rows, 0
        self._rows_wanted = None
        if rows and self._row_s is not None:
            now = time.monotonic()
            self._busy_until = max(now, self._busy_until) + rows * self._row_s
        if not self._allocated and not self._left:
            return NOTHING
        self._local |= self._allocated
        left: dict[int, set[bytes]] = {}
        if self._left and scheduler_output.total_num_scheduled_tokens:
            # vLLM may not send a step without tokens to the workers.
            left, self._left = self._left, {}
        self._allocated = set()
        if not self._loads and not self._saves and not self._checks and not left:
            return NOTHING
        loads = {name: self._load(lease, shape) for name, (lease, shape) in self._loads.items()}
        checks = {name: Check(key, self._load(lease, lease.tree.shape)) for name, (key, lease) in self._checks.items()}
        leases = [lease for lease, _ in self._loads.values()] + [lease for _, lease in self._checks.values()]
        if leases:
            self._in_flight[self._step] = leases, set(range(self._ranks))
        made = StepMetadata(
            self._step, loads, self._saves, left=left, rows=rows, checks=checks, adapters=self._step_adapters
        )
        self._loads, self._saves, self._checks, self._step_adapters = {}, {}, {}, {}
        return made

    def take_in(self, report: Report) -> None:
        """Processes the workers' reports on their steps."""
        for rank, ring in report.rings.items():
            if rank in self._rings:
                self._left.setdefault(rank, set()).add(self._rings[rank])
            self._rings[rank] = ring
        if report.adapters:
            self.adapters_changed({**self._adapters, **report.adapters})
        for rank, done in report.loaded.items():
            for step in [step for step in self._in_flight if step <= done]:
                missing = self._in_flight[step][1]
                missing.discard(rank)
                if not missing:
                    del self._in_flight[step]
        for key in report.settled:
            self._claims.settled(key)
        if report.encoded_rows:
            row_s = report.encode_s / report.encoded_rows
            self._row_s = row_s if self._row_s is None else 0.75 * self._row_s + 0.25 * row_s
        if report.failed:
            # The model has computed with zeros. All requests with that input are ended. Later requests for it are ended
            # too, since results computed with the zeros may be cached.
            self._damaged |= report.failed
        for key, by in report.differs:
            if self._lookups.distrust(key, by):
                for asking in self._asking.values():
                    self._release(asking)
                self._background.post_end(partial(_evict_namespace, key[:NAMESPACE_TAG_BYTES]))
        for name, amount in report.counts.items():
            self._counts.add(name, amount)

    def take_unavailable(self) -> set[str]:
        """Returns, once, the requests that vLLM has to end with an error."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def stats(self) -> TensordECStats | None:
        """The counts since the last call, and whether the daemon is connected; None if neither has changed."""
        taken = self._counts.take()
        presence = self._presence
        connected = presence is not None and presence.connected
        if taken is None and connected == self._connected_told:
            return None
        self._connected_told = connected
        return TensordECStats({**(taken or {}), CONNECTED: int(connected)})

    @property
    def held(self) -> dict[str, int]:
        """Numbers of held objects by kind: requests, inputs, leases, claims, steps in progress. For tests and
        diagnosis."""
        inputs = [found for asking in self._asking.values() for found in asking.inputs.values()]
        return {
            "requests": len(self._asking),
            "inputs": len(inputs),
            "leases": sum(found.lease is not None for found in inputs),
            "claims": self._claims.open,
            "steps": len(self._in_flight),
        }

    def close(self) -> None:
        """Releases everything and ends the thread. Idempotent."""
        for request_id in list(self._asking):
            self.finished(request_id)
        self._in_flight.clear()
        self._background.close()

    # ---- a request's inputs

    def _is_local(self, name: str) -> bool:
        """Whether the engine's own encoder cache has the input, or will have it by the end of the step."""
        return name in self._local or name in self._allocated

    def _outdated(self, asking: _Asking, features: Sequence[Any], computed: int) -> bool:
        """Whether the request needs an input without state here: its prompt grew, or the engine's cache dropped an
        input."""
        return asking.count != len(features) or any(
            name not in asking.inputs and not self._is_local(name)
            for name in (feature.identifier for feature in _ahead(features, computed))
        )

    def _begin(self, request: Any, computed: int) -> _Asking:
        asking = self._asking.get(request.request_id)
        if asking is None:
            asking = self._asking[request.request_id] = self._current = _Asking()
        asking.begin(request.mm_features)
        lora = request.lora_request if self._tower_lora else None
        adapter = self._adapter(lora) if lora is not None else None
        fresh: dict[str, Input] = {}
        for found in asking.inputs.values():
            self._leave(found, asking)
        for feature in _ahead(request.mm_features, computed):
            name, rows = feature.identifier, feature.mm_position.get_num_embeds()
            if name in asking.inputs or self._is_local(name):
                continue
            known = fresh.setdefault(name, Input(feature.modality, rows, feature.data, adapter))
            if known.datas[-1] is not feature.data or known.rows != rows:
                # Several inputs have one name. If their contents differ, none of them is shared.
                known.datas.append(feature.data if known.rows == rows else None)
        for found in fresh.values():
            nameless = (
                None in found.datas
                or (lora is not None and adapter is None)
                or found.rows < 1
                or found.modality in UNSHARED_MODALITIES
                or not self._lookups.named
            )
            if nameless:
                self._counts.add("unshared")
                found.state = "unshared"
            elif self._background.late or not self._background.post(partial(self._lookups.look_up, found)):
                self._counts.add("late")
                found.state = "unshared"
        asking.inputs.update(fresh)
        return asking

    def _adapter(self, lora_request: Any) -> tuple[int, str] | None:
        """The adapter's number and the digest of its weights, if all ranks hold the same weights; else None."""
        if lora_request.load_inplace:
            # vLLM loads the adapter anew in each step, so its weights in that step are not known yet.
            return None
        number = lora_request.lora_int_id
        digest = self._adapters.get(0, {}).get(number)
        return (number, digest) if digest is not None and self._holds(number, digest) else None

    def _holds(self, number: int, digest: str) -> bool:
        return all(self._adapters.get(rank, {}).get(number) == digest for rank in range(self._ranks))

    def _settled(self, asking: _Asking) -> bool:
        """Whether no result is left that is worth waiting for."""
        now = time.monotonic()
        for name in [name for name in asking.inputs if self._is_local(name)]:
            # Encoded or loaded meanwhile for another request of this engine.
            self._let_go(asking.inputs.pop(name), asking)
        if asking.order is None:
            for name, found in asking.inputs.items():
                if found.state == "asked":
                    if now - asking.since < max(self._wait_s_max, LOOK_UP_S) and not self._background.late:
                        return False
                    # The input is replaced by a new one, so that a late result of the background thread has no effect.
                    self._counts.add("late")
                    asking.inputs[name] = late = Input(found.modality, found.rows, None)
                    late.state = "unshared"
            # A missed input without a key is settled: the stored output does not fit, or another engine stores it.
            missed = [
                (found.key, name)
                for name, found in asking.inputs.items()
                if found.state == "missed" and found.key is not None
            ]
            asking.order = [name for _, name in sorted(missed)]
        while asking.reached < len(asking.order):
            needed = asking.inputs.get(asking.order[asking.reached])
            if needed is not None and self._waits(asking, needed, now):
                return False
            asking.reached += 1
        return True

    def _waits(self, asking: _Asking, found: Input, now: float) -> bool:
        """Whether the request waits for another engine, or for the daemon's answer."""
        assert found.key is not None
        if found.wanted is None:
            if self._is_full(asking, found.rows) and now - asking.since < self._wait_s_max:
                return True
            found.wanted = self._claims.want(found.key, found.rows, asking, now, self._own_s(found.rows))
        wanted = found.wanted
        if wanted is None:
            return False
        if wanted.state == "asked" and not self._claims.unanswered(wanted, now):
            return True
        if wanted.state == "waiting" and self._consumer:
            if self._is_sooner(wanted, now):
                self._counts.add("overtaken")
            else:
                if not asking.waits_since:
                    asking.waits_since = now
                    self._counts.add("waits")
                if now - asking.waits_since < self._patience_s(wanted, asking.waits_since):
                    return True
                self._counts.add("wait_timeouts")
        elif wanted.state == "waiting":
            # This engine has to encode the input anyway, and the other engine stores it.
            found.key = None
        elif wanted.state == "hit" and wanted.lease is not None:
            self._lookups.take(found, wanted.lease)
        if wanted.state != "compute":
            self._leave(found, asking)
        return False

    def _is_full(self, asking: _Asking, rows: int) -> bool:
        """Whether the claims already fill a step, and this request has none of them."""
        if asking.claims:
            return False
        ahead = self._claims.rows_ahead()
        return bool(ahead) and (ahead + rows > self._step_rows or self._claims.users_ahead() >= self._step_requests)

    def _own_s(self, rows: int) -> float:
        """Seconds until these rows would be stored, if encoded in one step with all rows that are claimed here or may
        be claimed for that step. A step's outputs are stored when the step ends. 0 if unknown."""
        if self._row_s is None:
            return 0.0
        under_way_s = max(0.0, self._busy_until - time.monotonic())
        return under_way_s + max(self._claims.rows_ahead() + rows, self._rows_of_step()) * self._row_s

    def _rows_of_step(self) -> int:
        """Rows that the next step may encode: those of the oldest requests, without rows that another engine
        encodes."""
        requests = rows = 0
        for asking in self._asking.values():
            of_request = sum(
                found.rows
                for found in asking.inputs.values()
                if found.lease is None and (found.wanted is None or found.wanted.state != "waiting")
            )
            if of_request:
                requests += 1
                rows += of_request
            if requests >= self._step_requests or rows >= self._step_rows:
                break
        return min(rows, self._step_rows)

    def _is_sooner(self, wanted: Wanted, now: float) -> bool:
        """Whether this engine would have encoded all inputs that it wants before the other engine has stored this
        one."""
        if self._row_s is None or not wanted.expected_at:
            return False
        return self._all_s(now) < SOONER * (wanted.expected_at - now)

    def _all_s(self, now: float) -> float:
        """Seconds until all inputs that are wanted here and not found would be stored, if this engine encoded them."""
        if self._rows_wanted is None:
            self._rows_wanted = sum(
                found.rows for asking in self._asking.values() for found in asking.inputs.values() if not found.lease
            )
        return max(0.0, self._busy_until - now) + self._rows_wanted * (self._row_s or 0.0)

    def _patience_s(self, wanted: Wanted, since: float) -> float:
        """Seconds to wait for the other engine: a multiple of the time that it expected, or else of the time that all
        work wanted here would take this engine. At most `wait_s_max`."""
        if wanted.expected_at:
            expected_s = wanted.expected_at - since
        elif self._row_s is not None:
            expected_s = self._all_s(since)
        else:
            return self._wait_s_max
        return min(max(WAIT_FACTOR * expected_s, WAIT_S_LEAST), self._wait_s_max)

    def _stores(self, found: Input) -> bool:
        """Whether the encoded output is to be stored: not by a mere consumer, not if it is stored already, not while a
        change of weights is unconfirmed, and not in a namespace whose sharing has ended."""
        assert found.key is not None
        return self._producer and found.lease is None and self._lookups.confirmed and self._lookups.trusts(found.key)

    def _release(self, asking: _Asking) -> None:
        for found in asking.inputs.values():
            self._let_go(found, asking)
        asking.inputs.clear()

    def _let_go(self, found: Input, asking: _Asking | None) -> None:
        found.lease = None
        self._leave(found, asking)

    def _leave(self, found: Input, asking: _Asking | None) -> None:
        if found.wanted is not None:
            self._claims.leave(found.wanted, asking)
            found.wanted = None

    # ---- a step's loads

    def _load(self, lease: Lease, shape: tuple[int, int]) -> Load:
        handle = lease.handle()
        if handle is not None and all(handle[:16] == self._rings.get(rank) for rank in range(self._ranks)):
            return Load(shape, handle)
        self._counts.add("inline")
        return Load(shape, None, lease.tree)

    def _drop_lost(self) -> None:
        for step in [step for step in self._in_flight if step + LAG_STEPS_MAX < self._step]:
            del self._in_flight[step]

    # ---- the background thread

    def _tick(self, client: Client) -> float:
        again_s = self._claims.tick(client)
        self._presence = self._presence or Presence(client, self._shares)
        self._presence.look(silent=self._claims.silent)
        return again_s


def _evict_namespace(tag: bytes, client: Client) -> None:
    requests.ask_clear(client.link, tag).result(ANSWER_S_MAX)


def _ahead(features: Sequence[Any], computed: int) -> Iterator[Any]:
    """The features that do not end before token `computed`."""
    for feature in features:
        position = feature.mm_position
        if computed < position.offset + position.length:
            yield feature


def _end(features: Sequence[Any]) -> int:
    """The position after the last feature. Features are in the order of their offsets."""
    last = features[-1].mm_position
    end: int = last.offset + last.length
    return end
