"""Keys: what a payload is the payload of, as 32 bytes.

A key is the namespace's 8-byte tag, then 20 bytes of SHA-256 over everything that tells two payloads apart, then the
generation. The tag leaves out the generation, so that the daemon finds all generations of a namespace from their keys
alone, and knows a key of a past one (`shm.keys`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import msgpack
import numpy as np

from ...errors import BadNamespace
from ...shm.keys import GENERATION_MAX, make_key
from ...shm.layout import NAMESPACE_TAG_BYTES

Content = bytes | bytearray | memoryview | np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What makes two encoders' outputs differ. Two models' embeddings of one picture must never meet.

    Args:
        model: name or path of the model.
        revision: a commit, or a fingerprint of the weights; required, since names outlive weights.
        dtype: of the outputs, as "bfloat16".
        processor: name and version of what turns raw media into the encoder's input.
        lora: fingerprint of the adapter, where there is one.
        tenant: a salt that keeps tenants' keys apart. It keeps keys apart, not bytes.
        generation: how often `Client.invalidate` said that the weights behind the name have changed. `Client.current`
            gives the namespace at its generation now: call it before you load the weights.
        hash: of the content: "sha256", or "blake3" where that package is installed.

    Raises:
        BadNamespace: one of model, revision, dtype and processor is missing or empty.

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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "generation":
                if not isinstance(value, int) or not 0 <= value <= GENERATION_MAX:
                    raise BadNamespace(f"generation={value!r} must be a number from 0 to {GENERATION_MAX}")
            elif not isinstance(value, str):
                raise BadNamespace(f"{field.name}={value!r} must be a string, not {type(value).__name__}")
            elif not value and field.name in ("model", "revision", "dtype", "processor"):
                raise BadNamespace(
                    f"{field.name} is empty: without it two different encoders' outputs would share a key; "
                    'give what tells them apart, or "none" where nothing does'
                )
        if self.hash not in ("sha256", "blake3"):
            raise BadNamespace(f'hash={self.hash!r} must be "sha256" or "blake3"')

    @property
    def tag(self) -> bytes:
        """8 bytes, the same for every generation: the beginning of every key."""
        named = [getattr(self, field.name) for field in fields(self) if field.name != "generation"]
        return hashlib.sha256(msgpack.packb(named)).digest()[:NAMESPACE_TAG_BYTES]

    def key(self, kind: str, modality: str, content: Content, **parameters: object) -> bytes:
        """The key of one payload.

        Args:
            kind: what is stored, as "encoder" or "processor".
            modality: "image", "audio", "video", "text".
            content: the raw bytes that were encoded; of an array its bytes in C order, its dtype and its shape.
            parameters: whatever else changes the output (resolution, crop), as msgpack can hold it.

        Returns:
            32 bytes.
        """
        described: list[object] = [kind, modality]
        if isinstance(content, np.ndarray):
            described += [content.dtype.str, list(content.shape)]
            content = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data
        try:
            packed = msgpack.packb(
                [self.generation, *described, self._content_hash(content), sorted(parameters.items())]
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise BadNamespace(f"parameters {parameters!r} cannot be part of a key: {error}") from None
        tag = self.tag
        return make_key(tag, hashlib.sha256(tag + packed).digest(), self.generation)

    def raised_to(self, generation: int) -> Namespace:
        """This namespace at another generation."""
        return replace(self, generation=generation)

    def _content_hash(self, content: bytes | bytearray | memoryview) -> bytes:
        if self.hash == "sha256":
            return hashlib.sha256(content).digest()
        try:
            from blake3 import blake3  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise BadNamespace('hash="blake3" needs the blake3 package: pip install "tensord[blake3]"') from None
        digest: bytes = blake3(content).digest()
        return digest
