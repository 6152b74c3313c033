"""The scheduler's side of the connector: decides which encoder inputs are loaded instead of encoded, and which engine
stores the others.

Owns: the state of each request's inputs (inputs.py), from the first time that the request may be scheduled until its
end. Does not own: keys and lookups (inputs.py), claims (claims.py), how long another engine is waited for (pace.py),
what the workers do in a step (steps.py). Only the step's thread uses this state, except for the results that the
background thread writes into an `Input`.

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
- The step's thread never waits, hashes, or talks to the daemon. If the daemon has not answered for LATE_S, no request
  waits for its answer to a claim any more.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from ...caches.measures import Counts
from ..engine.background import LATE_S, PAUSE_S
from ..engine.presence import does, engine_client_name
from ..engine.settings import Settings
from ..engine.weights import CHANGED
from .claims import EncodeClaims
from .inputs import Asking, Input, Lookups, inputs_of
from .pace import Pace
from .stats import CONNECTED, TensordECStats
from .steps import Report, Save, StepMetadata, StepPlan, ranks_of

UNSHARED_MODALITIES: Final = frozenset({"prompt_embeds"})
"""Inputs that the model receives as they are, without an encoder."""
_WRONG: Final = (
    "tensord: WRONG OUTPUT FOUND. The entry %s differs from the output that this engine encodes: a row differs by %.2g "
    "of its norm. Its namespace is evicted, and this engine shares no output until it restarts. The engines that share "
    "the namespace differ in something that its name does not cover: compare their models, versions and settings, tell "
    "them apart by tensord.revision, and report it"
)
_log = logging.getLogger("tensord")


class SchedulerSide:
    """The scheduler's side. A producer stores outputs, a consumer looks for them."""

    def __init__(self, vllm_config: Any, settings: Settings) -> None:
        lora = vllm_config.lora_config
        # Whether LoRA adapters affect the encoder. Inputs of requests with one are not shared then.
        self._tower_lora = lora is not None and lora.enable_tower_connector_lora
        # The most requests, and the most rows of encoder outputs, in one step.
        self._step_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._step_rows: int = vllm_config.scheduler_config.max_num_encoder_input_tokens
        self._wait_s_max = settings.wait_s_max
        self._producer: bool = vllm_config.ec_transfer_config.is_ec_producer
        self._consumer: bool = vllm_config.ec_transfer_config.is_ec_consumer
        self._canary = settings.canary
        self._compared = False
        self._connected_told: bool | None = None
        self._counts = Counts()
        self._lookups = Lookups(vllm_config, settings, does(self._producer, self._consumer), self._counts)
        self._asking: dict[str, Asking] = {}
        self._current: Asking | None = None
        self._damaged: set[str] = set()
        self._unavailable: set[str] = set()
        self._deferred = False
        self._plan = StepPlan(ranks_of(vllm_config), self._counts)
        self._pace = Pace(self._asking.values(), self._wait_s_max, self._step_requests, self._step_rows)
        name, failed = engine_client_name(vllm_config, "scheduler"), partial(self._counts.count, "errors")
        self._claims = EncodeClaims(settings.socket, name, failed)
        self._background = self._claims.background

    # ---- lookups for a request

    def ensure(self, request: Any, computed: int) -> bool:
        """Whether the request may be scheduled now. False defers it to a later step."""
        features = request.mm_features
        asking = self._current = self._asking.get(request.request_id)
        if self._damaged and any(feature.identifier in self._damaged for feature in features):
            self._unavailable.add(request.request_id)
            return False
        last = features[-1].mm_position  # features are in the order of their offsets
        if computed >= last.offset + last.length:
            if asking is not None:
                self._release(asking)
            return True
        needed = [
            feature
            for feature in features
            if computed < feature.mm_position.offset + feature.mm_position.length
            and not self._plan.is_local(feature.identifier)
        ]
        # Begins anew if an input has no state here: the prompt grew, or the engine's cache dropped an input.
        if (
            asking is None
            or asking.count != len(features)
            or any(feature.identifier not in asking.inputs for feature in needed)
        ):
            asking = self._begin(request, needed)
        if not asking.settled:
            asking.settled = self._settled(asking)
            self._deferred |= not asking.settled
        return asking.settled

    def has(self, identifier: str) -> bool:
        """Whether an input of the request that was ensured last is held here, and is to be loaded."""
        found = self._current.inputs.get(identifier) if self._current is not None and self._consumer else None
        if found is None or found.lease is None or found.key is None:
            return False
        if found.check is None:
            # The first hit, then a random share of all.
            found.check = self._canary > 0 and (not self._compared or random.random() < self._canary)
        return not found.check

    def allocated(self, request: Any, index: int) -> None:
        """Records that the encoder cache has space for the input: it is loaded, or encoded, in the present step."""
        feature = request.mm_features[index]
        # A second allocation in one step: the first request was preempted, and may have had another input of this name.
        undone = self._plan.allocate(feature.identifier)
        if undone is not None:
            self._claims.settled(undone.key)
        asking = self._asking.get(request.request_id)
        found = asking.inputs.pop(feature.identifier, None) if asking is not None else None
        if found is not None and found.lease is not None and self._consumer and not found.check:
            self._counts.count("hits")
            self._plan.loads[feature.identifier] = found.lease
        else:
            self._counts.count("misses")
            self._pace.allocate(feature.mm_position.get_num_embeds())
            if found is not None and found.key and found.lease is not None and found.check:
                self._compared = True
                self._plan.saves[feature.identifier] = Save(found.key, found.rows, check=True)
            # Not by a mere consumer, and not if it is stored already.
            elif found is not None and found.key and not found.lease and self._producer and self._lookups.shares:
                claim = self._claims.save(found.wanted) if found.wanted is not None else 0
                self._plan.saves[feature.identifier] = Save(found.key, found.rows, claim)
        if found is not None:
            self._let_go(found, asking)

    def finished(self, request_id: str) -> None:
        """Releases everything that the request holds, however it ended."""
        asking = self._asking.pop(request_id, None)
        if asking is not None:
            self._release(asking)
        self._unavailable.discard(request_id)

    def caches_reset(self, weights_kept: bool) -> None:
        """The engine's caches are empty. With other weights, sharing ends."""
        if not weights_kept:
            self._end_sharing(logging.WARNING, CHANGED, "encoder outputs")
            self._claims.end_saves()
        self._release(*self._asking.values())
        self._plan.local.clear()
        self._damaged.clear()

    # ---- the step's metadata

    def metadata(self, scheduler_output: Any) -> StepMetadata:
        """The metadata for the workers of the step that was just made."""
        self._plan.local.difference_update(scheduler_output.free_encoder_mm_hashes)
        tokens = scheduler_output.total_num_scheduled_tokens
        if self._deferred and not tokens:
            time.sleep(PAUSE_S)
        self._deferred = False
        return self._plan.make(tokens, self._pace.end_step())

    def take_in(self, report: Report) -> None:
        """Processes the workers' reports on their steps."""
        self._plan.take_in(report)
        for key in report.settled:
            self._claims.settled(key)
        if report.encoded_rows:
            self._pace.learn(report.encoded_rows, report.encode_s)
        # The model has computed with zeros. All requests with that input are ended. Later requests for it are ended
        # too, since results computed with the zeros may be cached.
        self._damaged |= report.failed
        for key, by in report.differs:
            self._end_sharing(logging.ERROR, _WRONG, key.hex(), by)
            self._release(*self._asking.values())
        self._counts.add(report.counts)

    def take_unavailable(self) -> set[str]:
        """Returns, once, the requests that vLLM has to end with an error."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def stats(self) -> TensordECStats | None:
        """The counts since the last call, and whether the daemon is connected; None if neither has changed."""
        taken, connected = self._counts.since_last(), self._background.connected
        if not taken and connected == self._connected_told:
            return None
        self._connected_told = connected
        return TensordECStats({**taken, CONNECTED: int(connected)})

    def close(self) -> None:
        """Releases everything and ends the thread. Idempotent."""
        for request_id in list(self._asking):
            self.finished(request_id)
        self._plan.in_progress.clear()
        self._background.close()

    # ---- a request's inputs

    def _begin(self, request: Any, features: Sequence[Any]) -> Asking:
        """Looks up these features of the request. A request that began before keeps its place among the others."""
        known = self._asking.get(request.request_id)
        if known is not None:
            self._release(known)
        asking = Asking(inputs_of(features), len(request.mm_features))
        self._current = self._asking[request.request_id] = asking
        adapted = self._tower_lora and request.lora_request is not None
        for found in asking.inputs.values():
            nameless = (
                None in found.datas
                or adapted
                or found.rows < 1
                or found.modality in UNSHARED_MODALITIES
                or not self._lookups.shares
            )
            if nameless:
                self._counts.count("unshared")
                found.state = "unshared"
            elif self._background.late or not self._background.post(partial(self._lookups.look_up, found)):
                self._counts.count("late")
                found.state = "unshared"
        return asking

    def _settled(self, asking: Asking) -> bool:
        """Whether no result is left that is worth waiting for."""
        now = time.monotonic()
        for name in [name for name in asking.inputs if self._plan.is_local(name)]:
            # Encoded or loaded meanwhile for another request of this engine.
            self._let_go(asking.inputs.pop(name), asking)
        for name, found in asking.inputs.items():
            if found.state == "asked":
                if now - asking.since < max(self._wait_s_max, LATE_S) and not self._background.late:
                    return False
                # The input is replaced by a new one, so that a late result of the background thread has no effect.
                self._counts.count("late")
                asking.inputs[name] = Input(found.modality, found.rows, [None], "unshared")
        for needed in asking.missed():
            if self._waits(asking, needed, now):
                return False
            needed.state = "decided"
        return True

    def _waits(self, asking: Asking, found: Input, now: float) -> bool:
        """Whether the request waits for another engine, or for the daemon's answer."""
        assert found.key is not None
        if found.wanted is None:
            rows, users = self._claims.ahead()
            full = rows and (rows + found.rows > self._step_rows or users >= self._step_requests)
            claims = any(each.wanted is not None for each in asking.inputs.values())
            if full and not claims and now - asking.since < self._wait_s_max:
                return True
            found.wanted = self._claims.want(found.key, found.rows, asking, now, self._pace.own_s(rows + found.rows))
        wanted = found.wanted
        if wanted is None:
            return False
        state = wanted.state
        if state == "asked" and now - wanted.since <= LATE_S:
            return True
        if state == "compute" and self._producer:
            return False
        if state == "waiting" and not self._consumer:
            # This engine has to encode the input anyway, and the other engine stores it.
            found.key = None
        elif state == "waiting" and self._pace.is_sooner(wanted.expected_at, now):
            self._counts.count("overtaken")
        elif state == "waiting":
            if not asking.waits_since:
                asking.waits_since = now
                self._counts.count("waits")
            if now - asking.waits_since < self._pace.patience_s(wanted.expected_at, asking.waits_since):
                return True
            self._counts.count("wait_timeouts")
        elif state == "hit":
            view = self._background.view
            lease = view.get(found.key) if view is not None else None
            if lease is not None:
                self._lookups.take(found, lease)
        self._leave(found, asking)
        return False

    def _end_sharing(self, level: int, why: str, *about: object) -> None:
        """Ends sharing and says why, once."""
        if self._lookups.shares:
            self._lookups.shares = False
            _log.log(level, why, *about)
            self._background.post_until_done(self._lookups.drop)

    def _release(self, *askings: Asking) -> None:
        for asking in askings:
            for found in asking.inputs.values():
                self._let_go(found, asking)
            asking.inputs.clear()

    def _let_go(self, found: Input, asking: Asking | None) -> None:
        found.lease = None
        self._leave(found, asking)

    def _leave(self, found: Input, asking: Asking | None) -> None:
        if found.wanted is not None:
            self._claims.leave(found.wanted, asking)
            found.wanted = None
