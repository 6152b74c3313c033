"""vLLM's processor cache on tensord: the sender in each frontend process, the receiver in each engine core.

Owns: the classes that vLLM calls, the hash under which an item is stored, and the packing of a reference into an item's
one field. Does not own: the form of items (items.py), the storage (client/caches/processor/cache.py), nor how vLLM
comes to use these classes (factories.py).

vLLM's own cache works with exactly one frontend, whose cache the engine mirrors. With several API processes or data
parallel engines each frontend has a separate cache. Here any number of frontends and engines share items by content.

Invariants: no call raises because the daemon is away or the ring is full. An item whose hash is determined by its
content (hashes.py) is shared by all processes. Any other hash, such as a client's UUID, may name other content in
another process; its item is stored for this frontend alone, for as long as that runs. An item without prompt updates
may come from a program that expanded the prompt itself, and is not stored: nobody could place it. An item with a
reference's field is a complete reference, or it is refused: a client may have sent it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.multimodal.cache import BaseMultiModalProcessorCache, BaseMultiModalReceiverCache, MultiModalCacheMissError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.multimodal.processing.processor import ResolvedPromptUpdate
from vllm.platforms import current_platform
from vllm.utils.cache import CacheInfo

from ....errors import ReferenceLost, TensordError, UnsupportedLeaf, UsageError
from ....shm.ring.layout import KEY_BYTES
from ...caches.processor.cache import Feature, ProcessorCache
from ...caches.processor.loans import LOAN_BYTES, Reference
from ...caches.processor.payload import Copy
from ...core.client import Client
from ...identity.content import DIGEST_ATTRIBUTE, content_digest
from ...identity.engine import processor_namespace
from ...reading.ring_mapping import HANDLE_BYTES
from ..engine.presence import ATTACH_S, Presence, client_name
from .hashes import follows_from_content
from .items import forms_of, item_tree, tree_item, tree_updates

_DIGEST: Final = "digest"
_REFERENCE: Final = "tensord_reference"
_SHARED_SCOPE: Final = b""
_SCOPE_BYTES: Final = 16
_PACKED_BYTES: Final = KEY_BYTES + HANDLE_BYTES + LOAN_BYTES
_PARTS: Final = (0, KEY_BYTES, KEY_BYTES + HANDLE_BYTES, _PACKED_BYTES, None)
_log = logging.getLogger("tensord")

Updates = Sequence[ResolvedPromptUpdate]
InItem = tuple[MultiModalKwargsItem, Updates] | None
OutItem = tuple[MultiModalKwargsItem | None, Updates]


class TensordSenderCache(BaseMultiModalProcessorCache):
    """The frontend's side. Stored items go to the engine as references of a few bytes.

    Args:
        vllm_config: names the model and its processor.
        socket: the daemon's socket; by default $TENSORD_SOCKET, the user's own, or the system's.
    """

    def __init__(self, vllm_config: VllmConfig, socket: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._client = Client(socket, name=client_name(vllm_config, "frontend"), attach_s=ATTACH_S)
        self._presence = Presence(self._client)
        namespace = self._client.current(processor_namespace(vllm_config.model_config))
        self.model_name = f"tensord {namespace.tag.hex()}"
        """The name that replaces the model's name in items' hashes. For a model in a folder, the model's name is a
        path."""
        self._forms = forms_of(namespace.tag)
        self.cache = ProcessorCache(self._client, namespace, accepts=self._forms.has)
        self._told = False
        self._own_scope = os.urandom(_SCOPE_BYTES)

    def is_cached_item(self, mm_hash: str) -> bool:
        return self.cache.is_cached([self._scoped(mm_hash)])[0]

    def get_and_update_item(self, mm_item: InItem, mm_hash: str) -> OutItem:
        """The item or its reference for the engine, and the item's prompt updates.

        Raises:
            MultiModalCacheMissError: `mm_item` is None, and the item is neither stored nor held.
        """
        is_cached = self.is_cached_item(mm_hash)
        if mm_item is not None:
            return self._send(*mm_item, mm_hash) if is_cached else self._store(*mm_item, mm_hash)
        tree = self.cache.held(self._scoped(mm_hash))
        if tree is None:
            raise MultiModalCacheMissError([mm_hash])
        return self._send(None, tree_updates(tree), mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        # The item is held until the lookup that follows. Only the lookup counts as a use.
        self.is_cached_item(mm_hash)

    def release_sender_touches(self) -> None:
        self.cache.release()

    def invalidate(self, mm_hash: str) -> None:
        self.cache.invalidate(_scoped_hash(scope, mm_hash) for scope in (_SHARED_SCOPE, self._own_scope))

    def validate_input_item(self, mm_item: MultiModalKwargsItem, mm_hash: str) -> None:
        """Checks an item that a client sent: if it is a reference, it must be the one of `mm_hash`.

        Raises:
            UsageError: it is a reference to another item, or not a complete reference.
        """
        found = _reference_in(mm_item, mm_hash)
        if found is None:
            return
        scope, reference = found
        known = scope in (_SHARED_SCOPE, self._own_scope)
        if not known or reference.key != self.cache.key(_scoped_hash(scope, mm_hash)):
            raise UsageError(f"the reference sent with the hash {mm_hash!r} is of another item; send the item itself")
        if not self.cache.lends(reference):
            # A reference that a client sent must not make the engine send messages to another process.
            mm_item.update(_reference_item(reference._replace(loan=bytes(LOAN_BYTES)), scope))

    def clear_cache(self) -> None:
        """Forgets the items that this frontend holds, its statistics, and the meaning of clients' UUIDs. Items stored
        by content stay: they are still right, and other engines use them.
        """
        self.cache.forget()
        self._own_scope = os.urandom(_SCOPE_BYTES)

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        stats = self.cache.make_stats(delta)
        if delta:
            # vLLM calls with delta=True when it updates its own metrics.
            for reason, amount in stats.passed_through.items():
                _passed_through().labels(reason).inc(amount)
        return CacheInfo(hits=stats.hits, total=stats.total)

    def close(self) -> None:
        self.cache.close()
        self._client.close()

    def _scope(self, mm_hash: str) -> bytes:
        return _SHARED_SCOPE if follows_from_content(mm_hash) else self._own_scope

    def _scoped(self, mm_hash: str) -> bytes:
        return _scoped_hash(self._scope(mm_hash), mm_hash)

    def _send(self, item: MultiModalKwargsItem | None, updates: Updates, mm_hash: str) -> OutItem:
        """A reference to the stored item; if it is no longer stored, the item itself."""
        try:
            (sent,) = self.cache.get_and_update([None], [self._scoped(mm_hash)])
        except ReferenceLost:
            # Another thread has cleared the cache since the item was found.
            if item is None:
                raise MultiModalCacheMissError([mm_hash]) from None
            return item, updates
        if isinstance(sent, Reference):
            return _reference_item(sent, self._scope(mm_hash)), updates
        return item if item is not None else tree_item(sent), updates

    def _store(self, item: MultiModalKwargsItem, updates: Updates, mm_hash: str) -> OutItem:
        if not updates:
            self.cache.pass_through("unsupported")
            return item, updates
        try:
            tree = item_tree(item, updates)
        except TensordError as error:
            self.cache.pass_through("unsupported")
            if not self._told:
                self._told = True
                _log.warning("tensord: a processor output goes to the engine uncached: %s (logged once)", error)
            return item, updates
        self._forms.learn(tree)
        # An item without tensors has no digest.
        with suppress(UnsupportedLeaf):
            tree[_DIGEST] = np.frombuffer(content_digest(item), np.uint8)
        (sent,) = self.cache.get_and_update([tree], [self._scoped(mm_hash)])
        return (_reference_item(sent, self._scope(mm_hash)) if isinstance(sent, Reference) else item), updates


class TensordReceiverCache(BaseMultiModalReceiverCache):
    """The engine core's side. It stores nothing: references are replaced by items over shared memory, items stay as
    they are.

    Args:
        vllm_config, socket: as for the sender.
        copy: as for ProcessorCache. By default, views if there is an accelerator, since data is copied to it before a
            model reads the data; else private copy-on-write pages. Fields that stay on the CPU are small, and are
            always copied.
    """

    def __init__(
        self, vllm_config: VllmConfig, socket: str | os.PathLike[str] | None = None, *, copy: Copy | None = None
    ) -> None:
        super().__init__()
        if copy is None:
            copy = "on_write" if current_platform.is_cpu() else False
        self._client = Client(socket, name=client_name(vllm_config, "receiver"), attach_s=ATTACH_S)
        namespace = self._client.current(processor_namespace(vllm_config.model_config))
        self.cache = ProcessorCache(self._client, namespace, copy=copy)
        self._told = False

    def get_and_update_features(self, mm_features: list[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
        """Fills in the data of all features. Pins all entries before it fills in the first.

        Raises:
            MultiModalCacheMissError: some items are not stored; it names all of those, and no feature was filled in.
            UsageError: a reference names another item than the feature's.
        """
        hashes = [feature.mm_hash or feature.identifier for feature in mm_features]
        items = self._items([feature.data for feature in mm_features], hashes)
        for feature, item in zip(mm_features, items, strict=True):
            feature.data = item
        return mm_features

    def get_and_update_item(self, mm_item: MultiModalKwargsItem | None, mm_hash: str) -> MultiModalKwargsItem:
        """The item itself, or the item that it refers to, or for None the item stored under `mm_hash`.

        Raises:
            MultiModalCacheMissError, UsageError: as for `get_and_update_features`.
        """
        return self._items([mm_item], [mm_hash])[0]

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: MultiModalKwargsItem | None = None) -> None:
        """Checks a reference. Pins are taken when features are filled in."""
        if mm_item is not None:
            _reference_in(mm_item, mm_hash)

    def clear_cache(self) -> None:
        self.cache.forget()

    def _items(self, data: Sequence[MultiModalKwargsItem | None], hashes: Sequence[str]) -> list[MultiModalKwargsItem]:
        asked = [_feature_of(each, hash) for each, hash in zip(data, hashes, strict=True)]
        try:
            filled = self.cache.get_and_update_features(asked)
        except ReferenceLost as lost:
            missing = [hash for feature, hash in zip(asked, hashes, strict=True) if feature.hash in lost.hashes]
            raise MultiModalCacheMissError(list(dict.fromkeys(missing))) from None
        made = [
            given.data if found is given else self._item(found.data, hash)
            for given, found, hash in zip(asked, filled, hashes, strict=True)
        ]
        malformed = [hash for hash, item in zip(hashes, made, strict=True) if item is None]
        if malformed:
            raise MultiModalCacheMissError(list(dict.fromkeys(malformed)))
        return made

    def _item(self, tree: Any, mm_hash: str) -> MultiModalKwargsItem | None:
        """The item of a tree, with the stored `content_digest`, since computing it would read all of the item. None if
        the tree is not an item."""
        try:
            item = tree_item(tree)
            for elem in item.values():
                if elem.field.keep_on_cpu:
                    elem.data = _owned(elem.data)
            if _DIGEST in tree:
                setattr(item, DIGEST_ATTRIBUTE, bytes(tree[_DIGEST]))
        except Exception:
            self.cache.pass_through("malformed")
            if not self._told:
                self._told = True
                _log.warning("tensord: %s is stored but not an item, so a miss (logged once)", mm_hash, exc_info=True)
            return None
        return item


@cache
def _passed_through() -> Counter:
    """This process's counter. vLLM's /metrics shows it, summed over all API processes."""
    return Counter("tensord_processor_passed_through", "Processed items that went to the engine whole.", ["reason"])


def _scoped_hash(scope: bytes, mm_hash: str) -> bytes:
    """The hash under which an item is stored in a scope."""
    return scope + mm_hash.encode("utf-8", "surrogatepass")


def _reference_item(reference: Reference, scope: bytes) -> MultiModalKwargsItem:
    """The reference that goes to the engine in place of an item."""
    data: Any = list(b"".join(reference) + scope)
    return MultiModalKwargsItem({_REFERENCE: MultiModalFieldElem(data=data, field=MultiModalBatchedField())})


def _reference_in(item: MultiModalKwargsItem, mm_hash: str) -> tuple[bytes, Reference] | None:
    """The scope of a reference, and the reference; None if `item` is not one.

    Raises:
        UsageError: the reference is not complete.
    """
    elem = item.get(_REFERENCE)
    if elem is None:
        return None
    data: Any = elem.data
    whole = len(item) == 1 and type(data) is list and len(data) in (_PACKED_BYTES, _PACKED_BYTES + _SCOPE_BYTES)
    if not whole or not all(type(byte) is int and 0 <= byte < 256 for byte in data):
        raise UsageError(f"the data sent with the hash {mm_hash!r} is not a complete reference; send the item itself")
    packed = bytes(data)
    *parts, scope = (packed[start:end] for start, end in pairwise(_PARTS))
    return scope, Reference(*parts)


def _feature_of(data: MultiModalKwargsItem | None, mm_hash: str) -> Feature:
    """The query for a feature: of the item that `data` refers to, or of `data` itself."""
    found = _reference_in(data, mm_hash) if data is not None else None
    scope, asked = found or (_SHARED_SCOPE, data)
    return Feature(_scoped_hash(scope, mm_hash), asked)


def _owned(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.clone()
    return type(data)(map(_owned, data)) if isinstance(data, list | tuple) else data
