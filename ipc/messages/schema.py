"""The field types of messages, with their ranges, the form of an error inside a message, the protocol version, and the
limits that Welcome sends to a client."""

from __future__ import annotations

import struct
from typing import Annotated, Final

from msgspec import Meta, Struct

from ...errors import TensordError, from_code

PROTOCOL_VERSION: Final = 5

KEYS_MAX: Final = 1024
TOKENS_MAX: Final = 4096
ENTRIES_MAX: Final = 1024
BLOCKS_MAX: Final = 1024
"""The most blocks of one sequence that an answer may name."""
PREFIX_BYTES_MAX: Final = 64 << 20
COST_MS_MAX: Final = 86_400_000.0
AGENT_NAME_CHARS_MAX: Final = 128
GRANTS_PER_REQUEST_MAX: Final = 256
GRANTS_PER_CLIENT_MAX: Final = 4096
"""Grants that a client may have. Each takes a pin word of its lane."""
TEXT_CHARS_MAX: Final = 2000
NUMBER_MAX: Final = (1 << 63) - 1
SIZE_BYTES_MAX: Final = 1 << 48
NAME_CHARS_MAX: Final = 128
DURATION_S_MAX: Final = 315_360_000.0  # ten years; NaN and infinity fail the comparison

Id = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
"""The id of a request. The requester chooses it, and the answer repeats it. Two open requests must not share an id."""
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
NamespaceTag = Annotated[bytes, Meta(min_length=8, max_length=8)]
"""The first 8 bytes of every key of a namespace. They are the same in all of its generations."""
Token = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
"""Names one claim."""
Bytes = Annotated[int, Meta(ge=0, le=SIZE_BYTES_MAX)]
SomeBytes = Annotated[int, Meta(ge=1, le=SIZE_BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Some = Annotated[int, Meta(ge=1, le=1 << 32)]
Seconds = Annotated[float, Meta(gt=0, le=DURATION_S_MAX)]
SecondsOrNone = Annotated[float, Meta(ge=0, le=DURATION_S_MAX)]
"""0 means none, or not known."""
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Code = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Keys = Annotated[list[Key], Meta(max_length=KEYS_MAX)]
PrefixBytes = Annotated[int, Meta(ge=0, le=PREFIX_BYTES_MAX)]
"""The size of a block's record, or of a prefix query."""
Milliseconds = Annotated[float, Meta(ge=0, le=COST_MS_MAX)]
Blocks = Annotated[list[Key], Meta(max_length=BLOCKS_MAX)]
Tokens = Annotated[list[Token], Meta(max_length=TOKENS_MAX)]
Sizes = Annotated[list[SomeBytes], Meta(min_length=1, max_length=GRANTS_PER_REQUEST_MAX)]
Numbers = Annotated[list[Count], Meta(max_length=GRANTS_PER_CLIENT_MAX)]
GRANT: Final = struct.Struct("<6Q")
"""Number, offset, bytes, span id, slot, seq of the slot."""
GrantBytes = Annotated[bytes, Meta(max_length=GRANTS_PER_REQUEST_MAX * GRANT.size)]
NoneOrOne = Annotated[int, Meta(ge=0, le=1)]
One = Annotated[int, Meta(ge=1, le=1)]
Three = Annotated[int, Meta(ge=3, le=3)]


class ClientLimits(Struct, frozen=True):
    """The limits of one client, as Welcome tells them. Every refusal for a limit names one of these fields."""

    message_bytes_max: Annotated[int, Meta(ge=1024, le=1 << 24)] = 65_536
    object_bytes_max: SomeBytes = 1 << 30
    requests_in_flight_max: Some = 1024
    claims_per_client_max: Some = 1024
    claim_s: Seconds = 10.0
    claim_s_max: Seconds = 120.0
    pins_per_client_max: Some = 1024
    pin_s_max: Seconds = 3600.0
    keys_per_request_max: Annotated[int, Meta(ge=1, le=KEYS_MAX)] = KEYS_MAX
    prefix_tokens_max: Some = 1 << 20
    tree_depth_max: Annotated[int, Meta(ge=1, le=256)] = 32


class ErrorBody(Struct, frozen=True):
    """An error of the tensord family as a part of a message. The receiver raises the same type."""

    code: Code
    text: Text

    @classmethod
    def of(cls, error: BaseException) -> ErrorBody:
        """The message part for `error`. The text is cut to TEXT_CHARS_MAX; characters outside UTF-8 are replaced."""
        code = error.code if isinstance(error, TensordError) else TensordError.__name__
        text = str(error) or type(error).__name__
        cut = text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"
        return cls(code, cut.encode("utf-8", "replace").decode("utf-8"))

    def to_error(self) -> TensordError:
        return from_code(self.code, self.text)


class Message(Struct, frozen=True, tag_field="type"):
    """The base class of all messages."""
