"""References to stored items, in the form in which vLLM sends items.

Owns: the packing of a reference into an item's one field, and the scope of a hash. Does not own: which scope an item is
stored under (caches.py), nor what a reference means (client/caches/processor/loans.py).
Invariants: an item with this field is a complete reference, or it is refused: a client may have sent it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from ....errors import UsageError
from ....shm.ring.layout import KEY_BYTES
from ...caches.processor.cache import Feature
from ...caches.processor.loans import LOAN_BYTES, Reference
from ...reading.ring_mapping import HANDLE_BYTES

SCOPE_BYTES: Final = 16
SHARED_SCOPE: Final = b""
_REFERENCE: Final = "tensord_reference"
_PACKED_BYTES: Final = KEY_BYTES + HANDLE_BYTES + LOAN_BYTES
_PARTS: Final = (0, KEY_BYTES, KEY_BYTES + HANDLE_BYTES, _PACKED_BYTES, None)


def scoped_hash(scope: bytes, mm_hash: str) -> bytes:
    """The hash under which an item is stored in a scope."""
    return scope + mm_hash.encode("utf-8", "surrogatepass")


def reference_item(reference: Reference, scope: bytes) -> MultiModalKwargsItem:
    """The reference that goes to the engine in place of an item."""
    data: Any = list(b"".join(reference) + scope)
    return MultiModalKwargsItem({_REFERENCE: MultiModalFieldElem(data=data, field=MultiModalBatchedField())})


def reference_in(item: MultiModalKwargsItem, mm_hash: str) -> tuple[bytes, Feature] | None:
    """The scope of a reference, and the query for its item; None if `item` is not a reference.

    Raises:
        UsageError: the reference is not complete.
    """
    elem = item.get(_REFERENCE)
    if elem is None:
        return None
    data: Any = elem.data
    whole = len(item) == 1 and type(data) is list and len(data) in (_PACKED_BYTES, _PACKED_BYTES + SCOPE_BYTES)
    if not whole or not all(type(byte) is int and 0 <= byte < 256 for byte in data):
        raise UsageError(f"the data sent with the hash {mm_hash!r} is not a complete reference; send the item itself")
    packed = bytes(data)
    key, handle, loan, scope = (packed[start:end] for start, end in pairwise(_PARTS))
    return scope, Feature(scoped_hash(scope, mm_hash), Reference(key, handle, loan))


def remove_loan(item: MultiModalKwargsItem) -> None:
    """Removes the loan from an item that is a reference."""
    data: Any = item[_REFERENCE].data
    data[_PACKED_BYTES - LOAN_BYTES : _PACKED_BYTES] = bytes(LOAN_BYTES)


def feature_of(data: MultiModalKwargsItem | None, mm_hash: str) -> Feature:
    """The query for a feature: of the item that `data` refers to, or of `data` itself.

    Raises:
        UsageError: `data` is a reference that is not complete.
    """
    found = reference_in(data, mm_hash) if data is not None else None
    return found[1] if found is not None else Feature(scoped_hash(SHARED_SCOPE, mm_hash), data)
