"""A request and its inputs, as the encoder cache takes them.

Owns: the checks of keys, token counts and indices. Does not own: what a request needs at a time (encoder.py).
Invariants: within a request, and in a cache, one key has one number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import TokensDiffer, UsageError, shown
from ...ipc.messages.schema import NUMBER_MAX
from ...shm.index.keys import shortened
from ..arguments.checks import check_count, check_iterable, check_key


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An image, sound or video of a request.

    Args:
        key: 32 bytes that identify the content and the encoder, as `Namespace.key` makes them.
        tokens: how many embeddings the encoder makes of it.

    Raises:
        BadKey: `key` is not 32 bytes.
        UsageError: `tokens` is not a whole number from 0.

    Example:
        >>> tensord.EncoderInput(key, 576).tokens
        576
    """

    key: bytes
    tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", check_key(self.key))
        object.__setattr__(self, "tokens", check_count("tokens", self.tokens, NUMBER_MAX))


@dataclass(frozen=True, slots=True)
class EncoderRequest:
    """A request and its inputs. Calls name an input by its index. An input may occur more than once.

    Raises:
        UsageError: `request_id` is no text, or `inputs` are no EncoderInputs.
        TokensDiffer: two inputs have the same key and different token counts.

    Example:
        >>> request = tensord.EncoderRequest("request-1", [tensord.EncoderInput(key, 576)])
        >>> len(request.inputs)
        1
    """

    request_id: str
    inputs: Sequence[EncoderInput]

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise UsageError(f"request_id is {shown(self.request_id)}; it must be a text")
        object.__setattr__(self, "inputs", tuple(check_iterable("inputs", self.inputs, "EncoderInputs")))
        known: dict[bytes, int] = {}
        for each in self.inputs:
            if not isinstance(each, EncoderInput):
                raise UsageError(f"inputs has {shown(each)}; it must be EncoderInputs")
            check_same(each, known.setdefault(each.key, each.tokens))


def check_request(request: object) -> EncoderRequest:
    if not isinstance(request, EncoderRequest):
        raise UsageError(f"request is {shown(request)}; it must be a tensord.EncoderRequest")
    return request


def check_input_id(input_id: object) -> int:
    """Returns `input_id`, a whole number, which may be out of range."""
    return check_count("input_id", input_id, NUMBER_MAX, -NUMBER_MAX)


def input_of(request: EncoderRequest, input_id: int) -> EncoderInput:
    """The input with this index. Raises UsageError if the request has none; negative indices are not allowed."""
    inputs, input_id = check_request(request).inputs, check_input_id(input_id)
    if not 0 <= input_id < len(inputs):
        raise UsageError(
            f"request {request.request_id!r} has no input {input_id}; it has {len(inputs)}, counted from 0"
        )
    return inputs[input_id]


def check_same(wanted: EncoderInput, tokens: int) -> None:
    """Raises TokensDiffer if an input has not as many tokens as its key stands for."""
    if wanted.tokens != tokens:
        raise TokensDiffer(
            f"key {shortened(wanted.key)} has {tokens} tokens, but the input has {wanted.tokens}: a key stands for "
            "one content and one encoder; make keys with Namespace.key, of the content itself"
        )
