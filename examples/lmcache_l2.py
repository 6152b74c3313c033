"""An L2 adapter of LMCache over tensord: LMCache servers of a host find each other's chunks, also after one has ended.

In an environment with LMCache 0.5.6 and tensord:

    tensord &
    PYTHONPATH=examples lmcache server --l1-size-gb 4 --eviction-policy LRU --l2-adapter '{"type": "plugin",
        "module_path": "lmcache_l2", "class_name": "TensordL2Adapter", "adapter_params": {"revision": "9f3c bfloat16"}}'

`revision` is required. LMCache names a chunk by its tokens, the model's name and the rank, but not by the weights, nor
by the KV's dtype and layout: give a text that differs where one of these differs. `socket` names another daemon's
socket.

How LMCache's contract is kept:

- Nothing waits in a `submit_` call. One thread does the tasks in order, and an event descriptor says when one is done.
- A lock is a lease: what a lookup has found stays until it is unlocked, even if the ring fills up.
- A store is as good as it says: it waits for the daemon, for a second. Without a daemon it fails, and LMCache goes on.
- Evicting is tensord's work. So the adapter tells LMCache of no stored keys, and declares no capacity.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

import tensord
from tensord.errors import Corrupt, TimedOut

STALL_S: Final = 1.0
_log = logging.getLogger("tensord.lmcache")


class TensordL2Adapter(L2AdapterInterface):  # type: ignore[misc, unused-ignore]
    """LMCache's chunks in tensord's ring.

    Args:
        params: `adapter_params` of the configuration: "revision", and optionally "socket" and "tenant".

    Raises:
        ValueError: "revision" is missing, or a key is unknown.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__(max_capacity_bytes=0)
        known = {"revision", "socket", "tenant"}
        if not params.get("revision") or set(params) - known:
            raise ValueError(f"adapter_params has {sorted(params)} of {sorted(known)}, and revision is required")
        self._namespace = tensord.Namespace(
            model="lmcache chunks",
            revision=params["revision"],
            dtype="none",
            processor="lmcache 1",
            tenant=params.get("tenant", ""),
        )
        self._client = tensord.Client(params.get("socket"), name="lmcache", timeout_s=STALL_S, attach_s=STALL_S)
        self._stored, self._found, self._loaded = (create_event_notifier() for _ in range(3))
        self._lock = threading.Lock()
        self._next_task = 0
        self._stores: dict[int, L2StoreResult] = {}
        self._lookups: dict[int, Bitmap] = {}
        self._loads: dict[int, Bitmap] = {}
        self._leases: defaultdict[bytes, list[tensord.Lease]] = defaultdict(list)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tensord-lmcache", daemon=True)
        self._thread.start()

    # ---- event descriptors

    def get_store_event_fd(self) -> int:
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._found.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._loaded.fileno())

    # ---- tasks

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(lambda: self._store(keys, objects), self._stores, L2StoreResult(False, 0), self._stored)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done = dict(self._stores)
            self._stores.clear()
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        return self._submit(lambda: self._look_up(keys), self._lookups, Bitmap(len(keys)), self._found)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._lookups.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._jobs.put(lambda: self._unlock(keys))

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(lambda: self._load(keys, objects), self._loads, Bitmap(len(keys)), self._loaded)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loads.pop(task_id, None)

    # ---- the rest of the interface

    def delete(self, keys: list[Any]) -> None:
        """LMCache drops chunks: by its own policy, or because it was asked to."""
        self._jobs.put(lambda: self._evict(keys))

    def close(self) -> None:
        """Ends the thread after the tasks that are queued, and lets all locks go."""
        self._jobs.put(None)
        self._thread.join()
        self._leases.clear()
        self._client.close()
        for notifier in (self._stored, self._found, self._loaded):
            notifier.close()

    def report_status(self) -> dict[str, Any]:
        return {
            "is_healthy": self._client.connected,
            "type": type(self).__name__,
            "socket": str(self._client.link.path),
            "locked_key_count": len(self._leases),
        }

    # ---- in the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("tensord: a task of LMCache failed")

    def _submit(self, act: Callable[[], Any], results: dict[int, Any], failed: Any, notifier: Any) -> int:
        with self._lock:
            number = self._next_task
            self._next_task += 1

        def job() -> None:
            result = failed
            try:
                result = act()
            finally:
                with self._lock:
                    results[number] = result
                notifier.notify()

        self._jobs.put(job)
        return number

    def _key(self, key: Any) -> bytes:
        named = {"model": key.model_name, "rank": key.kv_rank, "group": key.object_group_id, "salt": key.cache_salt}
        return self._client.current(self._namespace).key("kv", "text", key.chunk_hash, **named)

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        puts, size_bytes = [], 0
        for key, chunk in zip(keys, objects, strict=True):
            name = self._key(key)
            if self._client.contains(name):
                continue
            payload = np.frombuffer(chunk.byte_array, np.uint8)
            put = self._client.put(name, payload, timeout_s=STALL_S)
            if put.state in ("refused", "lost"):
                return L2StoreResult(False, 0)
            puts.append(put)
            size_bytes += payload.nbytes
        with suppress(TimedOut):
            for put in puts:
                put.wait(STALL_S)
        stored = all(put.state in ("stored", "existed") for put in puts)
        return L2StoreResult(stored, size_bytes if stored else 0)

    def _look_up(self, keys: Sequence[Any]) -> Bitmap:
        found = Bitmap(len(keys))
        for place, key in enumerate(keys):
            name = self._key(key)
            lease = self._client.get(name)
            if lease is not None:
                self._leases[name].append(lease)
                found.set(place)
        return found

    def _unlock(self, keys: Sequence[Any]) -> None:
        for name in map(self._key, keys):
            leases = self._leases.get(name, [])
            if leases:
                leases.pop().release()
            if not leases:
                self._leases.pop(name, None)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Bitmap:
        loaded = Bitmap(len(keys))
        for place, (key, chunk) in enumerate(zip(keys, objects, strict=True)):
            out = np.frombuffer(chunk.byte_array, np.uint8)
            with suppress(Corrupt):
                lease = self._client.get(self._key(key), verify=True)
                if lease is not None and isinstance(lease.tree, np.ndarray) and lease.tree.shape == out.shape:
                    np.copyto(out, lease.tree)
                    loaded.set(place)
        return loaded

    def _evict(self, keys: Sequence[Any]) -> None:
        self._client.evict(*map(self._key, keys))
