"""The store actor's answers to queries of the status socket.

Owns: the table of queries, and the findings of health. Does not own the figures of the core (`Store.status`).
Invariant: no query changes the store.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from tensord import __version__

from ...ipc.messages import control as messages
from ...ipc.messages.declared import handlers
from ...shm.ring.layout import unix_at_boot_s
from ..config.config import Config
from ..core.store import Store
from ..memory.copier import Copier
from ..memory.segments import HeldLane, Segments
from ..remote_stores.threads import RemoteThreads
from ..reports.counters import RequestTimes
from .lanes import lanes_pinning, read_pins
from .messages import Joined

HELD_BY_MAX: Final = 4
"""Lanes listed of those that pin the entry of a query."""
_MUST_STAY_0: Final = ("found_corrupt",)
_AT_START: Final = "It grows at a start only: free memory, and restart the daemon. At its last start"


@dataclass(eq=False, repr=False)
class StoreReport:
    """Answers queries about the store and its memory. `config`: the current configuration, which the store actor
    replaces after a reload. `clock` gives the seconds of `shm.clock`, `waiting` the number of messages that wait for
    the actor. `times`: how long requests took."""

    _store: Store
    _memory: Segments
    config: Config
    _copier: Copier
    _clients: Mapping[int, Joined]
    _: KW_ONLY
    clock: Callable[[], float]
    waiting: Callable[[], int]
    times: RequestTimes
    remote: RemoteThreads | None = None

    def __post_init__(self) -> None:
        self.reload: dict[str, Any] = {"number": 0, "at_unix_s": 0.0, "refused": "", "applied": [], "waiting": []}
        """The verdict of the last reload."""
        self._began = self.clock()
        self.grow_error = ""
        """Why the ring has stopped growing; empty if it has not."""
        queries: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
            messages.StatusQuery: self._status,
            messages.EntriesQuery: self._entries,
            messages.WhyQuery: self._why,
            messages.AdviseQuery: lambda _: self._store.reports.hit_curve(),
            messages.ClientsQuery: self._client_rows,
            messages.HealthQuery: self._health,
            messages.ConfigQuery: self._settings,
            messages.LatencyQuery: lambda _: self.times.as_dict(),
            messages.Watch: lambda _: {},
        }
        self._queries = handlers(messages.StatusRequest, queries)

    def answer(self, query: messages.StatusRequest) -> dict[str, Any]:
        """The body of the Document that answers `query`. Raises TensordError if it cannot be answered."""
        return self._queries[type(query)](query)

    def _entries(self, query: messages.EntriesQuery) -> dict[str, Any]:
        self._store.reports.unix_at_zero_s = unix_at_boot_s()
        entries, behind = self._store.reports.page(query.after, query.count, query.namespace, self.clock())
        return {"entries": entries, "behind": None if behind is None else behind.hex()}

    def _why(self, query: messages.WhyQuery) -> dict[str, Any]:
        """As `Reports.why`, with the lanes that pin the entry now: `lanes` of them (None: too many lanes to read them),
        of which the first HELD_BY_MAX are listed in `held_by`. `up_s`: the daemon's age."""
        self._store.reports.unix_at_zero_s = unix_at_boot_s()
        span_id = self._store.span_id(query.key)
        lanes = None if span_id is None else lanes_pinning(self._memory.lanes, span_id)
        answer = self._store.reports.why(query.key, self.clock(), None if lanes is None else bool(lanes))
        if answer["standing"] is not None:
            answer["standing"]["lanes"] = None if lanes is None else len(lanes)
            rows = [self._client_row(lane.client, lane, 0) for lane in (lanes or ())[:HELD_BY_MAX]]
            answer["standing"]["held_by"] = [{n: row[n] for n in ("client", "name", "pid", "lane")} for row in rows]
        return {**answer, "up_s": self.clock() - self._began}

    def _status(self, query: messages.StatusQuery) -> dict[str, Any]:
        superblock = self._memory.superblock
        lanes = self._memory.lanes
        store = self._store.status(self.clock())
        return {
            "version": __version__,
            "protocol": messages.PROTOCOL_VERSION,
            "instance": self._memory.instance,
            "epoch": superblock.epoch,
            "recovered": self._memory.recovered,
            "pid": os.getpid(),
            "uid": os.geteuid(),
            "uptime_s": self.clock() - self._began,
            "ring_bytes": superblock.limit_bytes,
            "ring_segment_bytes": superblock.ring_bytes,
            "ring_ready_bytes": store["ring_bytes"],
            "configured": {
                name: None if self.config.is_derived(name) else self.config.value(name)
                for name in ("ring_bytes", "max_entries")
            },
            "index_bytes": superblock.geometry.index_bytes,
            "clients": len(self._clients),
            "lanes": len(lanes),
            "lanes_orphaned": sum(lane.client is None for lane in lanes),
            "pins": sum(pins for _, pins in read_pins(lanes, self._store.lent_span_ids())),
            "inboxes": self._copier.inboxes,
            "fence": "expedited" if self._memory.fence_is_quick else "global",
            "quotas": {
                "refusals": dict(self._store.quotas.refusals),
                "requests_delayed": self._store.quotas.rates.delayed,
                "uids": self._uid_rows(),
            },
            "remote": None if self.remote is None else {**self.remote.status(), **store.pop("remote_state")},
            "store": store,
        }

    def _uid_rows(self) -> list[dict[str, Any]]:
        """One row for each uid that has a client, a lane or an entry, with its use of each shared resource."""
        clients = Counter(joined.peer.uid for joined in self._clients.values())
        lanes = Counter(lane.uid for lane in self._memory.lanes if lane.uid is not None)
        return [
            {"uid": uid, "clients": clients[uid], "lanes": lanes[uid], **stored}
            for uid, stored in sorted(self._store.reports.by_uid({*clients, *lanes}).items())
        ]

    def _client_rows(self, query: messages.ClientsQuery) -> dict[str, Any]:
        lanes = read_pins(self._memory.lanes, self._store.lent_span_ids())
        laned = {lane.client for lane, _ in lanes}
        rows = [self._client_row(lane.client, lane, pins) for lane, pins in lanes]
        rows += [self._client_row(client, None, 0) for client in self._clients if client not in laned]
        return {"clients": rows}

    def _client_row(self, client: int | None, lane: HeldLane | None, pins: int) -> dict[str, Any]:
        """A client, a lane, or both. A lane without a client is orphaned."""
        joined = self._clients.get(client) if client is not None else None
        return {
            "client": client,
            "name": joined.name if joined else "",
            "version": joined.version if joined else "",
            "pid": joined.pid if joined else None,
            "uid": joined.peer.uid if joined else lane.uid if lane else None,
            "lane": lane.reader.lane_id if lane else None,
            "orphaned": client is None,
            "pins": pins,
            "hits": lane.reader.hits if lane else 0,
            "misses": lane.reader.misses if lane else 0,
        }

    def _settings(self, query: messages.ConfigQuery) -> dict[str, Any]:
        """Every setting in force with its source. Sizes that existing memory or `tensorctl limit` decided differ from
        the configured ones."""
        superblock, limit_bytes = self._memory.superblock, self._store.status()["max_bytes"]
        decided = {"ring_bytes": (superblock.limit_bytes, "ring"), "max_entries": (superblock.max_entries, "ring")}
        if limit_bytes != min(self.config.max_bytes or superblock.limit_bytes, superblock.limit_bytes):
            decided["max_bytes"] = (limit_bytes, "tensorctl limit")
        return {"settings": self.config.explain(decided), "reload": self.reload}

    def _health(self, query: messages.HealthQuery) -> dict[str, Any]:
        """The health of the store. `problems`: findings that an operator must look at; the daemon serves all the same.
        `notices`: facts that an operator should know, and that a user of the host or a slow store may have caused."""
        store = self._store.status()
        ring_bytes = self._memory.superblock.limit_bytes
        problems = [f"{name} is {store[name]} and must be 0" for name in _MUST_STAY_0 if store[name]]
        if self._memory.shortage:
            problems.append(
                f"the ring has {ring_bytes} of {self.config.ring_bytes} configured bytes. {_AT_START}: "
                f"{self._memory.shortage}"
            )
        if self.grow_error:
            problems.append(f"the ring has {store['ring_bytes']} of {ring_bytes} bytes. {_AT_START}: {self.grow_error}")
        if store["regrow_error"]:
            problems.append(
                f"{store['withdrawn_bytes']} bytes of the ring cannot be allocated again; retrying: "
                f"{store['regrow_error']}"
            )
        remote = store["remote_state"] or {"serves": True, "refuses_writes": "", "not_agreed": 0, "removals_dropped": 0}
        if not remote["serves"]:
            problems.append(f"the remote store is left alone for now: {remote['why']}")
        if remote["refuses_writes"]:
            problems.append(f"the remote store takes no writes for now: {remote['refuses_writes']}")
        if remote["not_agreed"]:
            problems.append(
                f"{remote['not_agreed']} invalidated namespaces are not shared, and other hosts go on with their old "
                f"entries, until the remote store takes their generation: {remote['not_agreed_why']}"
            )
        if remote["removals_dropped"]:
            problems.append(
                f"{remote['removals_dropped']} evicted entries were not removed from the remote store, since too many "
                "removals waited: other hosts may still find them; remove them from the store"
            )
        no_lane = self._memory.lane_problem()
        if no_lane is not None:
            problems.append(no_lane)
        return {
            "healthy": not problems,
            "problems": problems,
            "notices": self._memory.notices,
            "ring_ready_bytes": store["ring_bytes"],
            "inbox_messages": self.waiting(),
        }
