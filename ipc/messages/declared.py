"""How a message is declared: the base classes that say where it may come and who handles it.

A message is one class. Its base names the socket on which it may come and the part of the daemon that handles it. Its
class attributes name the message that answers it, the messages that may follow the answer, and whether the client has
to be attached. `wire/connection` derives the order of messages from that, `handlers` the table of a part of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar, TypeVar, Union

from msgspec.msgpack import Decoder

from ...errors import TensordError, from_code
from .schema import Code, Count, ErrorBody, Id, Message, Text

Declared = TypeVar("Declared", bound=Message)
Handler = TypeVar("Handler")


class Kinds(dict[str, type[Message]]):
    """Message classes by the names that they have on the wire. `decode` makes a message of any of them."""

    def __init__(self, kinds: Iterable[type[Message]]) -> None:
        super().__init__((str(kind.__struct_config__.tag), kind) for kind in kinds)

    @cached_property
    def decode(self) -> Callable[[bytes], Message]:
        """Made with its first use: a client decodes no requests, and the daemon no answers."""
        return Decoder(Union[*self.values()]).decode


class Answer(Message, frozen=True):
    """A message from the daemon to a client: an answer or a push."""


class Reply(Answer, frozen=True):
    """The answer to the request with this id."""

    id: Id


class Done(Reply, frozen=True):
    """The request was carried out."""


class Counted(Reply, frozen=True):
    """The request was carried out, for `count` entries."""

    count: Count


class Document(Reply, frozen=True):
    """Answers a query. `body`: a map of names, numbers, lists and further maps."""

    body: dict[str, Any]


class Error(Answer, frozen=True):
    """A request was refused; without an id, the connection ends. `code`: the error's type."""

    id: Id | None
    code: Code
    text: Text

    @classmethod
    def of(cls, error: BaseException, id: int | None = None) -> Error:
        body = ErrorBody.of(error)
        return cls(id, body.code, body.text)

    def to_error(self) -> TensordError:
        return from_code(self.code, self.text)


class Request(Message, frozen=True):
    """A message from a client to the daemon. `pushes`: the further messages that the daemon sends because of it."""

    answered_by: ClassVar[type[Reply] | None] = None
    pushes: ClassVar[tuple[type[Answer], ...]] = ()


class Question(Request, frozen=True):
    """A request with an answer, which has the same id, and the class `answered_by` unless it is an Error."""

    id: Id


# ---- the control socket


class ControlRequest(Request, frozen=True):
    """May come on the control socket. `needs_lane`: only from a client that is attached."""

    needs_lane: ClassVar[bool] = True


class GreetingRequest(ControlRequest, Question, frozen=True):
    """Handled by the session itself."""


class AttachmentRequest(ControlRequest, Question, frozen=True):
    """Handled by the store's actor: it concerns memory that the client brings or gets."""


class StoreRequest(ControlRequest, frozen=True):
    """Handled by the store's core."""


class PrefixRequest(ControlRequest, Question, frozen=True):
    """Handled by the store's core, once the store's actor has read the query from the client's inbox. One at a time."""


class GovernorRequest(ControlRequest, frozen=True):
    """Handled by the governor's core. It needs no lane, so that a command can send it without attaching."""

    needs_lane = False


class GaugeRequest(ControlRequest, frozen=True):
    """Handled by the governor's actor, which hands it to the gauges."""

    needs_lane = False


# ---- the status socket


class StatusRequest(Question, frozen=True):
    """May come on the status socket. Answered by the store's actor."""

    answered_by = Document


class DaemonQuery(StatusRequest, frozen=True):
    """Answered by the store's actor and by the governor's actor. The status actor merges the two answers."""


# ---- what is derived


def declared(base: type[Declared]) -> list[type[Declared]]:
    """The classes of the messages with `base`, directly or through another base."""
    found: list[type[Declared]] = []
    for kind in base.__subclasses__():
        found += declared(kind) or [kind]
    return found


def answers(requests: Iterable[type[Request]]) -> list[type[Answer]]:
    """The classes of the messages that the daemon may send because of `requests`, each once."""
    sent = [kind for request in requests for kind in (*request.pushes, request.answered_by) if kind is not None]
    return [*dict.fromkeys(sent), Error]


def handlers(base: type[Message], table: Mapping[type[Any], Handler]) -> dict[type[Any], Handler]:
    """The handler of every message declared with `base`: what `table` has for its class, or else for its base. Raises
    TypeError, as the daemon starts, if a message has no handler, or `table` names a class without that base."""
    found: dict[type[Any], Handler] = {}
    for kind in declared(base):
        named = next((each for each in kind.__mro__ if each in table), None)
        if named is None:
            raise TypeError(f"{kind.__name__} is declared as a {base.__name__}, and nothing here handles it: add it")
        found[kind] = table[named]
    for named in table:
        if not issubclass(named, base):
            raise TypeError(f"{named.__name__} has a handler here, and is not declared as a {base.__name__}")
    return found


def id_of(message: Message) -> int | None:
    number: int | None = getattr(message, "id", None)
    return number
