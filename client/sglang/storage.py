"""The storage backend that SGLang's HiCache loads: the pages of its host pools, shared by all engines of the host.

Owns: the translation of SGLang's calls, and whether this rank shares. Does not own: names (names.py), addresses
and the daemon (exchange.py), nor which pages are stored and loaded, and when (SGLang).

Invariants: no exception leaves a method, apart from a wrong setting in the constructor. Until the weights are named,
and without a name, every lookup finds nothing and every store fails. A page is True only if all of its bytes are right.
A prefix is usable only if every pool has all that its hit policy asks for; a policy that is not known here makes no
prefix usable.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import takewhile
from typing import Any, Final, TypeVar, cast

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from ...errors import UsageError
from ..arguments.namespace import Namespace
from ..identity.engine import Nameless
from . import names
from .exchange import HostPages, PageExchange

_REPLICATED: Final = (PoolName.KV, PoolName.INDEXER)
"""Pools that are equal in all tensor-parallel ranks of an MLA model."""
_log = logging.getLogger("tensord")
Method = TypeVar("Method", bound=Callable[..., Any])
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_CLASS: Final = "SchedulerWeightUpdaterManager"
_CALLED_BEFORE_EVERY_CHANGE: Final = "_select_runners"
_storages: weakref.WeakSet[TensordHiCacheStorage] = weakref.WeakSet()


def _answers(otherwise: Callable[..., Any]) -> Callable[[Method], Method]:
    """Makes a method return `otherwise(*its arguments)` instead of raising, and log each kind of error once."""

    def around(method: Method) -> Method:
        @wraps(method)
        def guarded(self: TensordHiCacheStorage, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                call = method.__name__.strip("_")
                if (call, type(error)) not in self._errors:
                    self._errors.add((call, type(error)))
                    _log.warning("tensord: %s failed, so its pages are not shared: %s", call, error, exc_info=error)
                return otherwise(*args, **kwargs)

        return cast(Method, guarded)

    return around


def _none_of(pool: str, keys: Sequence[str] | None, *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys or ())


class TensordHiCacheStorage(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """One rank's pages of KV, shared with the same rank of all engines that have the same weights and settings.

    `--hicache-storage-backend dynamic` makes it. Its extra config names this class, and may have the keys of
    `names.StorageSettings`:

        {"backend_name": "tensord", "module_path": "tensord.client.sglang", "class_name": "TensordHiCacheStorage",
         "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}

    Raises:
        BadConfiguration: a setting of tensord is unknown or has an invalid value.
        UsageError: `tensord.socket` cannot be a socket's path.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        del kwargs
        settings = names.StorageSettings.read(storage_config.extra_config)
        self._config = storage_config
        self._settings = settings
        self._pages: dict[str, HostPages] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._arguments: dict[str, Any] = {}
        self._weights: str | None = None
        """The name of the weights. None: nothing is shared (yet)."""
        self._ended = False
        self._errors: set[tuple[str, type]] = set()
        rank = f"tp{storage_config.tp_rank} pp{storage_config.pp_rank} dp{storage_config.dp_rank}"
        shown = "".join(each if each.isprintable() else "?" for each in storage_config.model_name or "")
        self._exchange = PageExchange(settings.socket, f"sglang {shown} {rank}"[:128])
        self._naming = threading.Thread(target=self._name, name="tensord-sglang-naming", daemon=True)
        if _watch_weights(self):
            self._naming.start()
        else:
            _log.warning("tensord: this engine shares no KV: SGLang's changes of weights would not be noticed")

    # ---- the host pools

    @_answers(lambda *_: None)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    @_answers(lambda *_: None)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    # ---- pages of the KV pool, by address

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """The number of pages, from the first on, that are stored without a gap."""
        return self._stored(PoolName.KV, keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copies stored pages into the host pool, to (len(keys) × page_size,) int64. Returns for each page whether it
        was copied. After the first that was not, none is copied."""
        return self._load(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages of the host pool. Returns for each page whether it is stored."""
        return self._store(PoolName.KV, keys, host_indices, getattr(extra_info, "prefix_keys", None))

    # ---- pages of all pools of a hybrid model

    @_answers(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix of pages with everything that each pool's hit policy asks for."""
        kv = self._stored(PoolName.KV, keys)
        hits = {PoolName.KV: kv} if kv else {}
        usable = set(range(1, kv + 1))
        for transfer in pool_transfers or ():
            there = [self._exchange.client.contains(key) for key in self._keys(transfer.name, keys[:kv])]
            of_pool = _usable(transfer, there)
            if of_pool:
                hits[transfer.name] = max(of_pool)
            usable &= of_pool
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_get_v1` for each pool."""
        return {each.name: self._load(each.name, each.keys, each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """`batch_set_v1` for each pool."""
        return {each.name: self._store(each.name, each.keys, each.host_indices) for each in transfers}

    # ---- pages as tensors: SGLang without "interface_v1", whose pages have no name

    def get(self, key: str, *_: Any, **__: Any) -> None:
        return None

    def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[None]:
        return [None] * len(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        return False

    def batch_set(self, *_: Any, **__: Any) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # ---- the storage itself

    @_answers(lambda *_: False)
    def clear(self) -> bool:
        """Removes the pages of this rank, also for other engines. Returns whether the daemon has done it."""
        for namespace in list(self._namespaces.values()):
            self._exchange.client.clear(namespace)
        return True

    @_answers(lambda *_: None)
    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._ended = True
        self._exchange.client.close()

    def weights_change(self) -> None:
        """The engine's weights change from now on: this storage shares nothing any more."""
        if not self._ended:
            self._ended = True
            _log.warning("tensord: the engine's weights are changed, so it shares no KV any more until it is restarted")

    @property
    def shares(self) -> bool:
        """Whether pages are found and stored: the weights are named, and were not changed."""
        return self._weights is not None and not self._ended

    # ---- private

    def _name(self) -> None:
        """Names the weights, in a thread, since that may read all of them."""
        try:
            self._arguments = names.engine_arguments()
            self._weights = names.weights_name(self._config, self._settings, self._arguments)
        except (Nameless, OSError) as error:
            _log.warning("tensord: this engine shares no KV: %s", error)
        except Exception:
            _log.exception("tensord: this engine shares no KV, since its weights could not be named")
        else:
            _log.info("tensord: KV pages are shared; the weights are named %s", self._weights)

    def _register(self, name: str, host_pool: Any) -> None:
        try:
            self._pages[name] = HostPages(host_pool)
        except UsageError as error:
            _log.warning("tensord: pages of the pool %s are not shared: %s", name, error)

    def _keys(self, pool: str, keys: Sequence[str]) -> list[bytes]:
        """The pages' keys in the ring. None of them if nothing is shared."""
        pages = self._pages.get(pool)
        if not self.shares or pages is None:
            return []
        known = self._namespaces.get(pool)
        if known is None:
            assert self._weights is not None
            known = self._namespaces[pool] = names.namespace(
                self._weights,
                self._config,
                {**pages.layout, "pool": str(pool)},
                self._settings.tenant,
                self._arguments,
                replicated=self._config.is_mla_model and pool in _REPLICATED,
            )
        namespace = self._exchange.client.current(known)
        return [namespace.key("kv", "text", key.encode()) for key in keys]

    @_answers(lambda *_: 0)
    def _stored(self, pool: str, keys: Sequence[str]) -> int:
        return self._exchange.available(self._keys(pool, keys))

    @_answers(_none_of)
    def _load(self, pool: str, keys: Sequence[str] | None, host_indices: torch.Tensor | None) -> list[bool]:
        ours = self._keys(pool, keys or ())
        if not ours:
            return _none_of(pool, keys)
        return self._exchange.load(ours, self._pages[pool](host_indices, len(ours)))

    @_answers(_none_of)
    def _store(
        self,
        pool: str,
        keys: Sequence[str] | None,
        host_indices: torch.Tensor | None,
        before: Sequence[str] | None = None,
    ) -> list[bool]:
        ours = self._keys(pool, keys or ())
        if not ours:
            return _none_of(pool, keys)
        if pool in _REPLICATED and not self._config.is_storage_writer:
            return [self._exchange.client.contains(key) for key in ours]
        # Pages of other pools are stored before the KV, and not for each of its pages: they follow nothing.
        first = self._keys(pool, before[-1:])[0] if before else None
        parents = [first, *ours[:-1]] if pool == PoolName.KV else [None] * len(ours)
        return self._exchange.store(ours, self._pages[pool](host_indices, len(ours)), parents=parents)


def _usable(transfer: PoolTransfer, there: Sequence[bool]) -> set[int]:
    """The prefixes, in pages, for which a pool has all that its hit policy asks for. `there`: whether the pool's part
    of each page is stored."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return {end for end, _ in enumerate(takewhile(bool, there), 1)}
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        tail = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(there) + 1) if all(there[max(0, end - tail) : end])}
    return set()


def _watch_weights(storage: TensordHiCacheStorage) -> bool:
    """Tells the storage when this process changes its weights, before the first weight is changed, and of attempts that
    fail. False if this process has SGLang's scheduler, but not the function to hook: changes are not noticed."""
    _storages.add(storage)
    module = sys.modules.get(_UPDATER)
    if module is None:
        # No scheduler is in this process, so nothing here changes weights.
        return True
    owner = getattr(module, _CLASS, None)
    original = getattr(owner, _CALLED_BEFORE_EVERY_CHANGE, None)
    if owner is None or original is None:
        return False
    if not hasattr(original, "_tensord_hook"):

        @wraps(original)
        def select_runners(*args: Any, **kwargs: Any) -> Any:
            for each in list(_storages):
                each.weights_change()
            return original(*args, **kwargs)

        select_runners._tensord_hook = True  # type: ignore[attr-defined]
        setattr(owner, _CALLED_BEFORE_EVERY_CHANGE, select_runners)
    return True
