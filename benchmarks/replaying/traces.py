"""Recorded workloads as one stream, whatever the format of their files.

Owns: the formats of the files, block numbers, times, and which requests are counted. Does not own: caches.

Block numbers count up from 0 in order of first use. A request of kind "prefix" asks for the blocks of a sequence,
parents first; a block always has the same parent. A request of kind "object" asks for one object. A folder to warm with
holds the beginning of the same trace, which is uncounted. Without it the first 60 % are uncounted: of the requests, or,
for agents, of the sessions.
"""

from __future__ import annotations

import lzma
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from operator import attrgetter
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tensord.daemon.replacement import Turn

Kind = Literal["prefix", "object"]
Ints = npt.NDArray[np.int64]

WARM_SHARE: Final = 0.6
EQUAL_BYTES: Final = 512
"""The bytes of a block of a sequence: all equal, and the smallest span of a store. Only ratios matter."""
OBJECT_SCALE: Final = 64
"""A picture's file is smaller than its encoder output. Without this factor a span's header would be a large part of it.
The ratios of the sizes stay.
"""
MOONCAKE_TOKENS: Final = 512
CHUNK_TOKENS: Final = 1024
CHUNK_IDS: Final = 16
"""Hash ids of 64 tokens in a chunk. The last id names the chunk, because ids are chained."""
SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Request:
    """At `at` seconds `agent` ("" if unknown) asks for `blocks`, and stores the missing ones."""

    at: float
    agent: str
    blocks: Ints
    counted: bool


@dataclass(frozen=True, slots=True)
class Step:
    """At `at` seconds a call of `agent` ends."""

    at: float
    agent: str
    state: Turn


@dataclass(frozen=True, slots=True)
class Restart:
    """At `at` seconds the daemon stops, and another takes over its memory. Caches without a daemon continue."""

    at: float


@dataclass(frozen=True, slots=True)
class Trace:
    """One workload, in order of time. `sizes` (bytes) and `tokens` have one item for each block number.

    A cache's share is a share of the bytes of all distinct blocks, counted and uncounted.
    """

    name: str
    kind: Kind
    events: Sequence[Request | Step | Restart]
    sizes: list[int]
    tokens: list[int]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    def share_bytes(self, share: float) -> int:
        """The size of a cache of that share; for sequences, a multiple of the block size."""
        size_bytes = int(share * self.total_bytes)
        return size_bytes // EQUAL_BYTES * EQUAL_BYTES if self.kind == "prefix" else size_bytes

    def requests(self) -> Iterator[Request]:
        """The requests, without the ends of agents' calls."""
        return (event for event in self.events if isinstance(event, Request))


class _Chat(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]


class _Call(msgspec.Struct):
    """A call, or (type "subagent") all calls of an agent that was started here."""

    t: float
    type: str
    model: str = ""
    hash_ids: list[int] = []
    stop: str = ""
    api_time: float = 0.0
    agent_id: str = ""
    requests: list[_Call] = []
    tool_tokens: int = 0
    system_tokens: int = 0


class _Session(msgspec.Struct):
    id: str
    tool_tokens: int
    system_tokens: int
    requests: list[_Call]


@dataclass(slots=True)
class _Blocks:
    """The block numbers given out so far."""

    numbers: dict[object, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def number(self, name: object, size_bytes: int, tokens: int) -> int:
        number = self.numbers.setdefault(name, len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(size_bytes)
            self.tokens.append(tokens)
        return number


def mooncake(name: str, warm: Iterable[bytes], judged: Iterable[bytes] | None) -> Trace:
    """Requests with the chained hash ids of their blocks of 512 tokens; times in ms."""
    decode = msgspec.json.Decoder(_Chat).decode
    blocks, found = _Blocks(), list[Request]()
    for counted, line in _flagged(warm, judged):
        chat = decode(line)
        ids = chat.hash_ids
        numbers = [blocks.number(at, EQUAL_BYTES, MOONCAKE_TOKENS) for at in ids]
        if numbers and chat.input_length < len(ids) * MOONCAKE_TOKENS:
            blocks.tokens[numbers[-1]] = chat.input_length - (len(ids) - 1) * MOONCAKE_TOKENS
        found.append(Request(chat.timestamp / 1e3, "", np.array(numbers, np.int64), counted))
    return Trace(name, "prefix", list(_in_time(found)), blocks.sizes, blocks.tokens)


def agents(concurrency: int) -> Callable[[str, Iterable[bytes], Iterable[bytes] | None], Trace]:
    """Sessions of coding agents; `concurrency` is the mean number at once."""

    def read(name: str, warm: Iterable[bytes], judged: Iterable[bytes] | None) -> Trace:
        return _agents(name, concurrency, warm, judged)

    return read


def objects(columns: Callable[[bytes], tuple[float, bytes, int]]) -> Callable[..., Trace]:
    """One object a line: time, name, and the bytes of its file."""

    def read(name: str, warm: Iterable[bytes], judged: Iterable[bytes] | None) -> Trace:
        blocks, found = _Blocks(), list[Request]()
        for counted, line in _flagged(warm, judged):
            at, identity, size_bytes = columns(line)
            number = blocks.number(identity, OBJECT_SCALE * max(size_bytes, 1), 0)
            found.append(Request(at, "", np.array([number], np.int64), counted))
        return Trace(name, "object", list(_in_time(found)), blocks.sizes, blocks.tokens)

    return read


def _web_image(line: bytes) -> tuple[float, bytes, int]:
    at, _, rest = line.rstrip().partition(b",")
    path, _, size_bytes = rest.rpartition(b",")
    return float(at), path, int(size_bytes)


def _adapt_size(line: bytes) -> tuple[float, bytes, int]:
    at, identity, size_bytes = line.split()
    return float(at), identity, int(size_bytes)


def _agents(name: str, concurrency: int, warm: Iterable[bytes], judged: Iterable[bytes] | None) -> Trace:
    decode = msgspec.json.Decoder(_Session).decode
    blocks = _Blocks()
    sessions: list[list[Request | Step]] = []
    for counted, line in _flagged(warm, judged):
        session = decode(line)
        known: dict[int, int] = {}
        own = _calls(session.id, session, 0.0, counted, known, blocks)
        for call in session.requests:
            if call.type == "subagent":
                own += _calls(f"{session.id}/{call.agent_id}", call, call.t, counted, known, blocks)
        sessions.append(own)
    mean_s = sum(max((event.at for event in session), default=0.0) for session in sessions) / max(len(sessions), 1)
    chance = random.Random(SEED)
    starts = accumulate(chance.expovariate(concurrency / max(mean_s, 1e-9)) for _ in sessions)
    events = [
        replace(event, at=event.at + start)
        for start, session in zip(starts, sessions, strict=True)
        for event in session
    ]
    events.sort(key=attrgetter("at"))
    return Trace(name, "prefix", events, blocks.sizes, blocks.tokens)


def _calls(
    agent: str, of: _Session | _Call, start: float, counted: bool, known: dict[int, int], blocks: _Blocks
) -> list[Request | Step]:
    """The requests of one agent. `known`: the session's chunks by hash id.

    Agents with the same tools and system prompt share the chunks of both, as far as this agent's first call has them.
    """
    calls = [call for call in of.requests if call.type != "subagent"]
    if not calls:
        return []
    prompt_chunks = (of.tool_tokens + of.system_tokens) // CHUNK_TOKENS
    for place, chunk in enumerate(calls[0].hash_ids[CHUNK_IDS - 1 :: CHUNK_IDS][:prompt_chunks]):
        shared = (calls[0].model, of.tool_tokens, of.system_tokens, place)
        known.setdefault(chunk, blocks.number(shared, EQUAL_BYTES, CHUNK_TOKENS))
    found: list[Request | Step] = []
    for place, call in enumerate(calls):
        numbers = []
        for chunk in call.hash_ids[CHUNK_IDS - 1 :: CHUNK_IDS]:
            number = known.get(chunk)
            if number is None:
                number = known[chunk] = len(blocks.sizes)
                blocks.sizes.append(EQUAL_BYTES)
                blocks.tokens.append(CHUNK_TOKENS)
            numbers.append(number)
        at = start + call.t
        found.append(Request(at, agent, np.array(numbers, np.int64), counted))
        last = place == len(calls) - 1
        ended = at + call.api_time
        if last:
            found.append(Step(ended, agent, "finished"))
        elif call.stop in _STATES:
            found.append(Step(min(ended, start + calls[place + 1].t), agent, _STATES[call.stop]))
    return found


_STATES: Final[dict[str, Turn]] = {"tool_use": "tool_call", "end_turn": "turn_ended"}


def _in_time(found: Iterable[Request]) -> Iterator[Request]:
    """Moves a request that is earlier than the last one to the same time, also from one file to the next."""
    latest = 0.0
    for request in found:
        latest = max(latest, request.at)
        yield request if request.at == latest else replace(request, at=latest)


def _flagged(warm: Iterable[bytes], judged: Iterable[bytes] | None) -> Iterator[tuple[bool, bytes]]:
    """Lines, each with whether it is counted."""
    if judged is not None:
        return chain(((False, line) for line in warm), ((True, line) for line in judged))
    lines = list(warm)
    first = int(len(lines) * WARM_SHARE)
    return ((number >= first, line) for number, line in enumerate(lines))


@dataclass(frozen=True, slots=True)
class Source:
    """The file of one trace, without .xz, and its reader. `shares`: the sizes of a cache to replay."""

    name: str
    file: str
    read: Callable[[str, Iterable[bytes], Iterable[bytes] | None], Trace]
    shares: tuple[float, ...]


_CHAT_SHARES: Final = (0.01, 0.05, 0.10, 0.20, 0.40)
_AGENT_SHARES: Final = (0.0005, 0.001, 0.002, 0.005, 0.01)
SOURCES: Final = (
    Source("conversation", "mooncake_conversation_trace.jsonl", mooncake, _CHAT_SHARES),
    Source("synthetic", "mooncake_synthetic_trace.jsonl", mooncake, _CHAT_SHARES),
    *(Source(f"agents-{many}", "weka_claude_code_sessions.jsonl", agents(many), _AGENT_SHARES) for many in (4, 16, 64)),
    Source("web-images", "apache_images.csv", objects(_web_image), _CHAT_SHARES),
    Source("adaptsize", "adapt_size_request.trace", objects(_adapt_size), _CHAT_SHARES),
)


def load(source: Source, judged: Path, warm: Path | None = None) -> Trace | None:
    """The trace from a folder, warmed from another; None if the folder lacks the file.

    Raises:
        ValueError: a file does not have the format of the trace.
    """
    path = _path(judged, source.file)
    if path is None:
        return None
    before = _path(warm, source.file) if warm is not None else None
    try:
        if warm is None:
            return source.read(source.name, _lines(path), None)
        return source.read(source.name, () if before is None else _lines(before), _lines(path))
    except (ValueError, msgspec.DecodeError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is no trace of {source.name}: {error}") from error


def _path(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / file, folder / f"{file}.xz") if path.exists()), None)


def _lines(path: Path) -> Iterator[bytes]:
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        yield from (line for line in file if line.strip())
