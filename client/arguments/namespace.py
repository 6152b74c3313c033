"""Namespaces and keys. A key identifies a payload by 32 bytes: the namespace's 8-byte tag, then 20 bytes of SHA-256
over everything that tells two payloads apart, then the generation.

Does not own: how the daemon recognises a key of a past generation (`shm.index.keys`).
Invariants: the tag does not depend on the generation. So the daemon finds all generations of a namespace by its keys
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import msgpack
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...errors import BadNamespace, shown
from ...shm.index.keys import GENERATION_MAX, make_key
from ...shm.ring.layout import NAMESPACE_TAG_BYTES

Content = bytes | bytearray | memoryview | np.ndarray[Any, Any]


class Namespace(Struct, frozen=True, kw_only=True):
    """Everything that makes two encoders' outputs differ. Two models' embeddings of one picture must never share a key.

    Args:
        model: name or path of the model.
        revision: a commit, or a fingerprint of the weights. Required, because a name may get new weights.
        dtype: dtype of the outputs, for example "bfloat16".
        processor: name and version of the processor that turns raw media into the encoder's input.
        lora: fingerprint of the adapter, if there is one.
        tenant: a salt that makes a tenant's keys its own. It does not protect the payloads: every client can map the
            ring.
        generation: how often `Client.invalidate` has dropped the namespace. `Client.current` returns the namespace at
            its current generation: call it before you load the weights.
        hash: hash of the content: "sha256", or "blake3" if that package is installed.

    Raises:
        BadNamespace: one of model, revision, dtype and processor is missing or empty, or a value is out of its range.

    Example:
        >>> ns = tensord.Namespace(model="my/vlm", revision="9f3c", dtype="float32", processor="mine-1.0")
        >>> len(ns.key("encoder", "image", b"the bytes of a picture"))
        32
    """

    model: str
    revision: str
    dtype: str
    processor: str
    lora: str = ""
    tenant: str = ""
    generation: int = 0
    hash: Literal["sha256", "blake3"] = "sha256"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "generation":
                if not isinstance(value, int) or not 0 <= value <= GENERATION_MAX:
                    raise BadNamespace(f"generation={shown(value)} must be a whole number from 0 to {GENERATION_MAX}")
            elif not isinstance(value, str):
                raise BadNamespace(f"{name}={shown(value)} must be a string, not {type(value).__name__}")
            elif not value.isascii() and value.encode("utf-8", "replace").decode("utf-8") != value:
                raise BadNamespace(f"{name}={shown(value)} must be a text without surrogates")
            elif not value and name in ("model", "revision", "dtype", "processor"):
                raise BadNamespace(
                    f"{name} is empty; without it the outputs of two different encoders would share a key; "
                    'give a value that differs between them, or "none" if there is none'
                )
        if self.hash not in ("sha256", "blake3"):
            raise BadNamespace(f'hash={shown(self.hash)} must be "sha256" or "blake3"')

    @property
    def tag(self) -> bytes:
        """The first 8 bytes of every key of this namespace, the same for all generations."""
        named = [getattr(self, name) for name in self.__struct_fields__ if name != "generation"]
        return hashlib.sha256(msgpack.packb(named)).digest()[:NAMESPACE_TAG_BYTES]

    def key(self, kind: str, modality: str, content: Content, **parameters: object) -> bytes:
        """Returns the key of one payload.

        Args:
            kind: what the payload is, for example "encoder" or "processor".
            modality: "image", "audio", "video" or "text".
            content: the raw bytes that were encoded. For an array: its bytes in C order, its dtype and its shape.
            parameters: all other inputs that change the output (resolution, crop), of types that msgpack can pack:
                numbers, texts, bytes, None, lists and maps, nested. The order of a map's items makes no difference. A
                scalar of numpy counts as the Python number that it converts to: `np.int64(3)` as 3, `np.bool_(True)` as
                True, `np.float32(0.1)` as float(np.float32(0.1)), which is not 0.1. The types bool, int and float
                differ: True, 1 and 1.0 make three keys.

        Returns:
            32 bytes.

        Raises:
            BadNamespace: a parameter cannot be packed, or the blake3 package is missing.
        """
        described: list[object] = [kind, modality]
        if isinstance(content, np.ndarray):
            described += [content.dtype.str, list(content.shape)]
        hashed = self._content_hash(content)
        try:
            packed = msgpack.packb([self.generation, *described, hashed, list(_same_for_equals(parameters).items())])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadNamespace(
                f"kind {shown(kind)}, modality {shown(modality)} and parameters {shown(parameters)} cannot be part of "
                f"a key: {error}"
            ) from None
        tag = self.tag
        return make_key(tag, hashlib.sha256(tag + packed).digest(), self.generation)

    def raised_to(self, generation: int) -> Namespace:
        """This namespace at another generation."""
        return replace(self, generation=generation)

    def _content_hash(self, content: Content) -> bytes:
        hasher: Callable[[Any], Any] = hashlib.sha256
        if self.hash != "sha256":
            try:
                from blake3 import blake3  # type: ignore[import-not-found, unused-ignore]
            except ImportError:
                raise BadNamespace('hash="blake3" needs the blake3 package: pip install "tensord[blake3]"') from None
            hasher = blake3
        try:
            if isinstance(content, np.ndarray):
                content = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
            elif isinstance(content, memoryview) and not content.c_contiguous:
                content = content.tobytes()
            digest: bytes = hasher(content).digest()
        except TypeError as error:
            raise BadNamespace(
                f"content of type {type(content).__name__} cannot be hashed: {error}; pass its raw bytes, or an array "
                "of numbers"
            ) from None
        return digest


def _same_for_equals(value: Any) -> Any:
    """`value` with all maps in it sorted, texts first, and all scalars of numpy as Python's numbers. Everything else is
    left to msgpack, so that what it packs in this order anyway keeps its key."""
    if isinstance(value, dict):
        items = [(_same_for_equals(key), _same_for_equals(of_key)) for key, of_key in value.items()]
        return dict(sorted(items, key=lambda item: _order(item[0])))
    if isinstance(value, list | tuple) and not isinstance(value, msgpack.ExtType):
        return tuple(map(_same_for_equals, value))
    # Not by their classes: numpy's durations are integers, which without their units would be as good as any number.
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    return value


def _order(key: Any) -> tuple[bool, Any]:
    return (False, key) if isinstance(key, str) else (True, msgpack.packb(key))


def check_namespace(namespace: object) -> Namespace:
    """Returns `namespace`; BadNamespace if it is none."""
    if not isinstance(namespace, Namespace):
        raise BadNamespace(
            f"namespace is {shown(namespace)}; it must be a tensord.Namespace(model=..., revision=..., dtype=..., "
            "processor=...)"
        )
    return namespace
