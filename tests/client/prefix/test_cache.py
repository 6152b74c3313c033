"""PrefixCache: what of a sequence is found again, what a match holds, and what is refused."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord import Media, NormalLayer, PrefixCache, PrefixMatch, RecurrentLayer, RotatingLayer, SharedLayer
from tensord.client.core.answers import PendingRequest
from tensord.client.prefix import put as prefix_put
from tensord.client.prefix.layers import PrefixLayer, cut
from tensord.client.prefix.tokens import media_of, tokens_of
from tensord.errors import (
    BadPrefix,
    Corrupt,
    DaemonUnavailable,
    Invalidated,
    LimitReached,
    ParentGone,
    StoreFull,
    TensordError,
    UnsupportedLeaf,
    UsageError,
)
from tensord.ipc import messages
from tensord.shm.layout import aligned
from tensord.shm.packing import pack
from tensord.shm.prefix import PrefixRecord, block_key

from ...daemon_process import MIB, PATIENCE_S, Daemon, until
from ...processes import Child, Stage

_numbers = count()
BLOCK = 16
TEXT = np.arange(1, 101, dtype=np.uint32)
"""A hundred tokens: six blocks and a quarter."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=32 * MIB) as running:
        yield running.start()


def test_in_a_full_ring_a_sequence_does_not_evict_its_own_blocks() -> None:
    with Daemon(ring_bytes=8 * MIB) as daemon, daemon.start().client() as client:
        cache = PrefixCache(
            client, tensord.Namespace(model="own", revision="1", dtype="float32", processor="none"), block_tokens=32
        )
        layer = NormalLayer(np.zeros((1, 2, 400, 128), np.float32))
        for number in range(150):
            tokens = np.arange(400, dtype=np.uint32) + np.uint32(1000 * number)
            put = cache.put(tokens, [layer], wait=True)
            assert put.state == "stored", put.error
            match = cache.match(np.append(tokens, np.uint32(7)))
            assert match is not None and match.offset == 400
            del match


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> tensord.Client:
    return daemon.client()


@pytest.fixture
def namespace() -> tensord.Namespace:
    return namespace_of(next(_numbers))


@pytest.fixture
def cache(client: tensord.Client, namespace: tensord.Namespace) -> PrefixCache:
    return PrefixCache(client, namespace, block_tokens=BLOCK)


def namespace_of(number: int) -> tensord.Namespace:
    return tensord.Namespace(model=f"prefix-{number}", revision="1", dtype="float32", processor="none")


def kv(tokens: Sequence[int] | np.ndarray[Any, Any], wide: int = 4) -> dict[str, Any]:
    """What a layer would have of tokens: each position's depends on all tokens up to it. [1, 2, tokens, wide]"""
    sums = np.cumsum(np.asarray(tokens, np.float64))
    k = np.broadcast_to(sums[None, None, :, None], (1, 2, len(sums), wide))
    return {"k": k, "v": (-k).astype(np.float32)}


def normal(tokens: Sequence[int] | np.ndarray[Any, Any], layers: int = 2) -> list[PrefixLayer]:
    return [NormalLayer(kv(tokens)) for _ in range(layers)]


def stored(
    cache: PrefixCache, tokens: np.ndarray[Any, Any], layers: list[PrefixLayer] | None = None, **more: Any
) -> Any:
    put = cache.put(tokens, normal(tokens) if layers is None else layers, **more).wait(PATIENCE_S)
    assert put.state in ("stored", "existed"), put
    return put


def matched(cache: PrefixCache, tokens: Any, **more: Any) -> PrefixMatch:
    match = cache.match(tokens, **more)
    assert match is not None
    return match


def offset_of(cache: PrefixCache, tokens: Any, **more: Any) -> int:
    match = cache.match(tokens, **more)
    return 0 if match is None else match.offset


def assert_right(match: PrefixMatch, tokens: np.ndarray[Any, Any], layer: int = 0) -> None:
    """That the match's arrays are those of its tokens."""
    wanted = kv(tokens[: match.offset])
    found = match.joined(layer)
    np.testing.assert_array_equal(found["k"], wanted["k"])
    np.testing.assert_array_equal(found["v"], wanted["v"])


def picture(start: int, length: int, content: bytes, modality: Any = "image") -> Media:
    return Media(start, length, modality, hashlib.sha256(content).digest())


def changed(tokens: np.ndarray[Any, Any], at: int) -> np.ndarray[Any, Any]:
    other = tokens.copy()
    other[at:] += 1000
    return other


# ---- matches


@pytest.mark.parametrize("at", [1, 15, 16, 17, 57, 96, 99])
def test_the_longest_prefix_is_exact_to_the_token(cache: PrefixCache, at: int) -> None:
    stored(cache, TEXT)
    stored(cache, changed(TEXT, 5))
    match = matched(cache, changed(TEXT, at))
    assert match.offset == at
    np.testing.assert_array_equal(match.remaining, changed(TEXT, at)[at:])
    assert_right(match, TEXT)
    assert [len(parts) for parts in match.layers] == [-(-at // BLOCK)] * 2
    assert match.snapshot is None and match.keep == {"image": 0, "audio": 0, "video": 0}


def test_nothing_is_matched_that_was_not_stored_under_that_name(client: tensord.Client, cache: PrefixCache) -> None:
    assert cache.match(TEXT) is None
    stored(cache, TEXT)
    assert cache.match(TEXT + np.uint32(1)) is None
    assert cache.match(TEXT[:1]) is None
    assert PrefixCache(client, namespace_of(next(_numbers)), block_tokens=BLOCK).match(TEXT) is None


def test_a_full_match_leaves_one_token_to_compute(cache: PrefixCache) -> None:
    stored(cache, TEXT)
    for tokens in (TEXT, TEXT[:64], TEXT[:65]):
        match = matched(cache, tokens)
        assert match.offset == len(tokens) - 1
        np.testing.assert_array_equal(match.remaining, tokens[-1:])
    assert offset_of(cache, np.append(TEXT, np.uint32(7))) == len(TEXT)


def test_a_picture_that_differs_ends_the_match_where_it_begins(cache: PrefixCache) -> None:
    media = [picture(10, 8, b"cat"), picture(40, 30, b"dog"), picture(75, 5, b"bark", "audio")]
    stored(cache, TEXT, media=media)
    same = matched(cache, TEXT, media=media)
    assert same.offset == 99 and same.keep == {"image": 0, "audio": 0, "video": 0}
    other = matched(cache, TEXT, media=[media[0], picture(40, 30, b"wolf"), media[2]])
    assert other.offset == 40 and other.keep == {"image": 1, "audio": 1, "video": 0}
    assert_right(other, TEXT)
    # Only one side has it; it begins elsewhere; it is longer; it is of another modality.
    assert offset_of(cache, TEXT, media=media[1:]) == 10
    assert offset_of(cache, TEXT, media=[media[0], picture(41, 29, b"dog"), media[2]]) == 40
    assert offset_of(cache, TEXT, media=[media[0], picture(40, 31, b"dog"), media[2]]) == 40
    assert offset_of(cache, TEXT, media=[picture(10, 8, b"cat", "video"), *media[1:]]) == 10
    # Text that differs inside of a picture, too: none is ever cut in two.
    inside = matched(cache, changed(TEXT, 50), media=media)
    assert inside.offset == 40 and inside.keep["image"] == 1


def test_the_kept_tokens_are_counted_from_the_match(cache: PrefixCache) -> None:
    media = [picture(4, 4, b"a"), picture(30, 4, b"b"), picture(60, 4, b"c")]
    stored(cache, TEXT, media=media)
    assert matched(cache, changed(TEXT, 20), media=media).keep["image"] == 2
    assert matched(cache, changed(TEXT, 34), media=media).keep["image"] == 1
    assert matched(cache, changed(TEXT, 33), media=media).keep["image"] == 2


def test_a_picture_that_a_prefill_stopped_in_is_matched_up_to_its_start(cache: PrefixCache) -> None:
    stored(cache, TEXT[:8], media=[picture(1, 2, b"a"), picture(5, 2, b"b", "audio"), picture(6, 3, b"c")])
    match = matched(cache, TEXT[:9], media=[picture(1, 2, b"a"), picture(5, 2, b"b", "audio"), picture(6, 3, b"c")])
    assert match.offset == 5 and match.keep == {"image": 1, "audio": 1, "video": 0}


# ---- what a match holds


def test_views_are_of_the_ring_itself_and_read_only(client: tensord.Client, cache: PrefixCache) -> None:
    stored(cache, TEXT)
    match = matched(cache, changed(TEXT, 57))
    first, *_, last = [part["k"] for part in match.layers[1]]
    assert first.shape == (1, 2, BLOCK, 4) and last.shape == (1, 2, 57 % BLOCK, 4)
    ring = client.ring()
    assert ring is not None
    for view in (first, last):
        assert not view.flags.writeable and not view.flags.owndata
    again = matched(cache, TEXT)
    assert np.shares_memory(again.layers[1][0]["k"], first)
    assert match.layers is match.layers
    with pytest.raises(ValueError, match="read-only"):
        first[:] = 0


def test_the_blocks_of_a_match_are_unchanged_by_evictions(daemon: Daemon, client: tensord.Client) -> None:
    cache = PrefixCache(client, namespace_of(next(_numbers)), block_tokens=BLOCK)
    stored(cache, TEXT)
    with matched(cache, TEXT) as match:
        parts = match.layers[0]
    del match
    other = PrefixCache(daemon.client(), namespace_of(next(_numbers)), block_tokens=BLOCK)
    before = sum(daemon.store("evictions").values())
    big = np.zeros((1, 1, 2 * BLOCK, 4096))
    for number in range(1, 60):
        tokens = np.full(2 * BLOCK, number, np.uint32)
        other.put(tokens, [NormalLayer(big)]).wait(PATIENCE_S)
    assert sum(daemon.store("evictions").values()) > before
    cache.evict_all()
    np.testing.assert_array_equal(np.concatenate([part["k"] for part in parts], 2), kv(TEXT[:99])["k"])
    assert cache.match(TEXT) is None


def test_a_match_that_was_released_says_so(cache: PrefixCache) -> None:
    stored(cache, TEXT)
    match = matched(cache, TEXT)
    match.release()
    for use in (lambda: match.layers, lambda: match.snapshot, lambda: match.joined(0), lambda: match.torch(0)):
        with pytest.raises(ValueError, match="released"):
            use()


def test_a_match_lets_go_when_it_is_collected(daemon: Daemon, cache: PrefixCache, client: tensord.Client) -> None:
    view = client.link.view
    assert view is not None
    stored(cache, TEXT)
    before = view.lane.in_use
    match = matched(cache, TEXT)
    assert view.lane.in_use == before + 7
    del match
    assert view.lane.in_use == before


def test_a_block_evicted_before_it_is_pinned_shortens_the_match(cache: PrefixCache, client: tensord.Client) -> None:
    media = [picture(40, 30, b"dog")]
    stored(cache, TEXT, media=media)
    real = answer_of(cache, TEXT, media)
    blocks = list(real.blocks)
    blocks[4] = bytes(32)
    cache._asker.ask = lambda *_: messages.Matched(1, 99, blocks)  # type: ignore[method-assign]
    # Four blocks are 64 tokens, in which the picture is not whole.
    match = matched(cache, TEXT, media=media)
    assert match.offset == 40 and match.keep["image"] == 1
    assert_right(match, TEXT)
    cache._asker.ask = lambda *_: messages.Matched(1, 99, [bytes(32), *blocks[1:]])  # type: ignore[method-assign]
    assert cache.match(TEXT, media=media) is None


def test_a_client_that_holds_nearly_all_it_can_gets_a_shorter_match(cache: PrefixCache, client: tensord.Client) -> None:
    view = client.link.view
    assert view is not None
    stored(cache, TEXT)
    writer = client.link.puts.writer
    assert writer is not None
    until(lambda: not writer.arena._asked, "the daemon's places, each of which takes a word")
    others = np.zeros(1, np.uint8)
    view.lane.tie_many(view.lane.take_many(len(view.lane.free) - 3), others)
    match = matched(cache, TEXT)
    assert match.offset == 3 * BLOCK
    assert_right(match, TEXT)
    assert cache.match(TEXT) is None


def answer_of(cache: PrefixCache, tokens: np.ndarray[Any, Any], media: Sequence[Media] = ()) -> messages.Matched:
    answer = cache._asker.ask(tokens, tuple(media), "", time.monotonic() + PATIENCE_S)
    assert answer is not None
    return answer


def test_without_its_snapshot_nothing_of_a_recurrent_layer_is_matched(cache: PrefixCache) -> None:
    stored(cache, TEXT, [*normal(TEXT), RecurrentLayer(np.ones(3))])
    longer = np.append(TEXT, np.uint32(7))
    real = answer_of(cache, longer)
    assert real.snapshot is not None
    gone = messages.Matched(1, real.offset, real.blocks, bytes(32))
    cache._asker.ask = lambda *_: gone  # type: ignore[method-assign]
    assert cache.match(longer) is None


@pytest.mark.parametrize("exact", [False, True])
def test_a_match_evicted_as_a_whole_before_it_is_pinned_is_asked_for_again_once(
    cache: PrefixCache, client: tensord.Client, exact: bool
) -> None:
    large = PrefixCache(client, cache.namespace, block_tokens=64)
    layers = [*normal(TEXT), RecurrentLayer(np.ones(3))] if exact else None
    stored(cache, TEXT, layers, snapshots={48: [np.full(3, 48.0)]} if exact else None)
    ask = cache._asker.ask
    deadlines: list[float] = []

    def asked(query: Any, media: Any, agent: str, deadline: float) -> messages.Matched | None:
        deadlines.append(deadline)
        answer = ask(query, media, agent, deadline)
        if answer is not None and len(deadlines) == 1:
            if exact:
                assert answer.offset == 100 and answer.snapshot is not None
                assert client.evict(answer.snapshot) == 1
            else:
                assert client.evict(answer.blocks[0]) >= 1
                stored(large, TEXT[:40])
        return answer

    cache._asker.ask = asked  # type: ignore[method-assign]
    match = matched(cache, np.append(TEXT, np.uint32(7)))
    assert match.offset == (48 if exact else 40)
    assert_right(match, TEXT)
    assert len(deadlines) == 2 and deadlines[0] == deadlines[1]
    # What is gone again by then is a miss.
    deadlines.clear()

    def gone(query: Any, media: Any, agent: str, deadline: float) -> messages.Matched:
        deadlines.append(deadline)
        return messages.Matched(1, 40, [bytes(32)] * 3)

    cache._asker.ask = gone  # type: ignore[method-assign]
    assert cache.match(TEXT) is None and len(deadlines) == 2


# ---- blocks that do not hold what they say


def _lie(name: str, given: dict[str, Any], at: int) -> dict[str, Any]:
    """What another client's writer makes of a block that begins at `at`."""
    axes, layers = given["axes"], given["layers"]
    first, second = layers[0], layers[1]
    lies: dict[str, tuple[int | None, dict[str, Any]]] = {
        "a short block": (16, {"layers": [first, cut(second, -2, 0, 5)]}),
        "a short first block": (0, {"layers": [cut(first, -2, 0, 5), second]}),
        "a short last block": (48, {"layers": [first, cut(second, -2, 0, 5)]}),
        "short blocks": (None, {"layers": [cut(first, -2, 0, 5), cut(second, -2, 0, 5)]}),
        "no axes": (None, {"axes": None}),
        "axes of fewer layers": (None, {"axes": []}),
        "an axis that no array has": (None, {"axes": [-2, 99]}),
        "an axis that is none": (None, {"axes": [-2, "tokens"]}),
        "an axis that is a truth": (None, {"axes": [True, True]}),
        "another axis": (32, {"axes": [-2, 2]}),
        "arrays without an axis": (None, {"axes": [-2, None]}),
        "fewer layers": (None, {"layers": [first]}),
        "fewer layers in one": (32, {"layers": [first], "axes": axes[:1]}),
        "no layers": (32, {"layers": "none"}),
        "a layer that one lacks": (32, {"layers": [first, None]}),
        "a layer that all lack": (None, {"layers": [first, None]}),
        "a layer of no arrays": (None, {"layers": [first, {"k": 5}]}),
        "another dtype": (16, {"layers": [first, {name: array.astype("f2") for name, array in second.items()}]}),
        "another place": (16, {"layers": [first, {"k": second["k"], "w": second["v"]}]}),
        "another width": (16, {"layers": [first, {name: array[..., :3] for name, array in second.items()}]}),
        "no record": (48, {"record": given["prefix"]}),
        "another record": (48, {"record": given["prefix"], "prefix": given["prefix"].view(np.uint32)}),
    }
    where, lie = lies[name]
    if where not in (None, at):
        return given
    if "record" in lie:
        # The daemon reads the first leaf, whatever its name.
        return lie | {"axes": axes, "layers": layers}
    return given | lie


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a short block", r"block 1 \(.*, layer 1: .*'k'.* 5 tokens along axis -2, but the block 16;"),
        ("a short first block", r"block 0 \(.*, layer 0: .* 5 tokens along axis -2, but the block 16;"),
        ("a short last block", r"block 3 \(.*, layer 1: .* 5 tokens along axis -2, but the block 16;"),
        ("short blocks", r"block 0 \(.*, layer 0: .* 5 tokens"),
        ("no axes", "has no 'axes' list"),
        ("axes of fewer layers", "0 axes for 2 layers"),
        ("an axis that no array has", "layer 1: .* no axis 99"),
        ("an axis that is none", "layer 1: its axis is 'tokens'"),
        ("an axis that is a truth", "layer 0: its axis is True"),
        ("another axis", r"block 2 \(.*layers differ from those of the blocks before"),
        ("arrays without an axis", "layer 1: .* no axis None"),
        ("fewer layers", "2 axes for 1 layers"),
        ("fewer layers in one", r"block 2 \(.*layers differ"),
        ("no layers", r"block 2 \(.*has no 'layers' list"),
        ("a layer that one lacks", r"block 2 \(.*layers differ"),
        ("a layer that all lack", "layer 1: it has no array, and there is no snapshot"),
        ("a layer of no arrays", "layer 1: it has no array, but the block has 16 tokens"),
        ("another dtype", r"block 1 \(.*layers differ"),
        ("another place", r"block 1 \(.*layers differ"),
        ("another width", r"block 1 \(.*layers differ"),
        ("no record", r"block 3 \(.*no valid record"),
        ("another record", r"block 3 \(.*no valid record.*uint32"),
    ],
)
def test_blocks_that_do_not_hold_what_they_say_are_named_and_never_given(
    client: tensord.Client, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    def lying(given: dict[str, Any], depth_max: int) -> Any:
        return pack(_lie(name, given, PrefixRecord.unpack(given["prefix"].data).start), depth_max)

    monkeypatch.setattr(prefix_put, "pack", lying)
    stored(cache, TEXT)
    match = matched(cache, changed(TEXT, 57))
    assert match.offset == 57
    for use in (lambda: match.layers, lambda: match.joined(0), lambda: match.torch(0)):
        with pytest.raises(Corrupt, match=says) as error:
            use()
    found = re.search(r"block (\d) \((\w+)…\)", str(error.value))
    assert found is not None
    block = int(found[1])
    key = answer_of(cache, changed(TEXT, 57)).blocks[block]
    assert key.hex().startswith(found[2])
    client.evict(key)
    assert offset_of(cache, changed(TEXT, 57)) == block * BLOCK


def test_blocks_that_end_elsewhere_than_the_match_are_not_given(cache: PrefixCache) -> None:
    stored(cache, TEXT)
    blocks = answer_of(cache, TEXT).blocks
    for offset, chosen in ((60, blocks[:3]), (99, blocks[:3]), (40, blocks[:4]), (48, blocks[:4]), (30, blocks[1:3])):
        answer = messages.Matched(1, offset, chosen)
        cache._asker.ask = lambda *_, answer=answer: answer  # type: ignore[method-assign]
        match = matched(cache, TEXT)
        with pytest.raises(Corrupt, match=f"the match ends at {offset};"):
            match.joined(0)


def test_a_block_without_a_record_where_a_match_would_be_shortened_is_a_miss(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(given: dict[str, Any], depth_max: int) -> Any:
        return pack(_lie("no record", given, PrefixRecord.unpack(given["prefix"].data).start), depth_max)

    monkeypatch.setattr(prefix_put, "pack", lying)
    stored(cache, TEXT)
    blocks = list(answer_of(cache, TEXT).blocks)
    gone = messages.Matched(1, 99, [*blocks[:4], bytes(32), *blocks[5:]])
    cache._asker.ask = lambda *_: gone  # type: ignore[method-assign]
    assert cache.match(TEXT) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda states: states[:2], "the snapshot .* 2 layers, but the blocks have 3"),
        (lambda states: [*states[:2], None], "the snapshot .*, layer 2: it has no state"),
    ],
)
def test_a_snapshot_that_lacks_a_state_is_named_and_never_given(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    def lying(given: dict[str, Any], depth_max: int) -> Any:
        if PrefixRecord.unpack(given["prefix"].data).snapshot:
            given = given | {"layers": change(given["layers"])}
        return pack(given, depth_max)

    monkeypatch.setattr(prefix_put, "pack", lying)
    window = RotatingLayer({name: array[:, :, -40:] for name, array in kv(TEXT).items()}, 40)
    stored(cache, TEXT, [*normal(TEXT), window])
    match = matched(cache, np.append(TEXT, np.uint32(7)))
    with_torch: list[Callable[[], object]] = [lambda: match.torch(2)] if find_spec("torch") else []
    for use in (lambda: match.snapshot, lambda: match.joined(2), *with_torch):
        with pytest.raises(Corrupt, match=says):
            use()
    assert_right(match, TEXT)


# ---- sharing


def test_sequences_share_the_blocks_of_their_beginning(daemon: Daemon, cache: PrefixCache) -> None:
    with daemon.client() as client:
        # What other tests have left may expire at any moment.
        client.clear()
    before = daemon.store("entries")
    put = stored(cache, TEXT)
    assert (put.state, put.blocks, put.blocks_stored, put.blocks_existed) == ("stored", 7, 7, 0)
    put = stored(cache, changed(TEXT, 70))
    assert (put.state, put.blocks, put.blocks_stored, put.blocks_existed) == ("stored", 7, 3, 4)
    assert daemon.store("entries") == before + 10
    put = stored(cache, TEXT)
    assert (put.state, put.blocks_stored, put.blocks_existed) == ("existed", 0, 7)
    for tokens in (TEXT, changed(TEXT, 70)):
        assert_right(matched(cache, np.append(tokens, np.uint32(7))), tokens)


def test_a_picture_tells_blocks_apart_that_have_the_same_tokens(cache: PrefixCache) -> None:
    stored(cache, TEXT, media=[picture(20, 4, b"cat")])
    put = stored(cache, TEXT, media=[picture(20, 4, b"dog")])
    assert (put.blocks_existed, put.blocks_stored) == (1, 6)


def test_caches_with_other_block_sizes_share_matches(
    client: tensord.Client, namespace: tensord.Namespace, cache: PrefixCache
) -> None:
    large = PrefixCache(client, namespace, block_tokens=64)
    assert stored(large, TEXT).blocks == 2
    for asker in (cache, large):
        match = matched(asker, changed(TEXT, 70))
        assert match.offset == 70 and [part["k"].shape[2] for part in match.layers[0]] == [64, 6]
        assert_right(match, TEXT)


def _in_another_process(stage: Stage, socket: Path, number: int) -> None:
    cache = PrefixCache(tensord.Client(socket), namespace_of(number), block_tokens=BLOCK)
    match = matched(cache, TEXT, agent="other")
    assert_right(match, TEXT)
    stage.tell(match.offset)
    put = cache.put(changed(TEXT, 80), normal(changed(TEXT, 80))).wait(PATIENCE_S)
    stage.tell((put.state, put.blocks_existed))


def test_processes_share_sequences(daemon: Daemon, client: tensord.Client) -> None:
    number = next(_numbers)
    cache = PrefixCache(client, namespace_of(number), block_tokens=BLOCK)
    stored(cache, TEXT, agent="first")
    with Child(_in_another_process, daemon.socket, number) as child:
        assert child.hear() == 99
        assert child.hear() == ("stored", 5)
    assert_right(matched(cache, changed(TEXT, 80)), changed(TEXT, 80))


def test_an_invalidated_namespace_never_meets_what_was_before(
    client: tensord.Client, namespace: tensord.Namespace, cache: PrefixCache
) -> None:
    stored(cache, TEXT)
    raised = client.invalidate(namespace)
    after = PrefixCache(client, raised, block_tokens=BLOCK)
    assert cache.match(TEXT) is None and after.match(TEXT) is None
    # Of the old generation nothing is stored any more, whoever has not heard of it.
    put = cache.put(TEXT, normal(TEXT)).wait(PATIENCE_S)
    assert put.state == "refused" and isinstance(put.error, Invalidated)
    assert cache.match(TEXT) is None and after.match(TEXT) is None
    assert stored(after, TEXT).blocks_existed == 0


def test_blocks_of_arrays_of_another_shape_are_not_joined(cache: PrefixCache) -> None:
    stored(cache, TEXT[:32], [NormalLayer(kv(TEXT[:32], wide=4))])
    put = stored(cache, TEXT, [NormalLayer(kv(TEXT, wide=8))])
    assert put.blocks_existed == 0
    match = matched(cache, TEXT)
    assert match.offset == 99 and match.joined(0)["k"].shape == (1, 2, 99, 8)


# ---- layers


def test_a_state_is_found_only_where_it_was_kept(cache: PrefixCache) -> None:
    states = {position: [{"s": np.full(5, position)}] for position in (20, 48, 100)}
    layers = [*normal(TEXT), SharedLayer(), RecurrentLayer(states[100][0])]
    stored(cache, TEXT, layers, snapshots={20: states[20], 48: states[48]})
    for query, wanted in (
        (np.append(TEXT, np.uint32(7)), 100),
        (TEXT, 48),
        (changed(TEXT, 48), 48),
        (changed(TEXT, 47), 20),
        (changed(TEXT, 21), 20),
        (changed(TEXT, 19), 0),
    ):
        match = cache.match(query)
        assert (0 if match is None else match.offset) == wanted
        if match is not None:
            assert match.snapshot is not None
            np.testing.assert_array_equal(match.snapshot[3]["s"], states[wanted][0]["s"])
            np.testing.assert_array_equal(match.joined(3)["s"], states[wanted][0]["s"])
            assert match.snapshot[:3] == [None] * 3 and match.layers[2:] == [[], []] and match.joined(2) is None
            assert_right(match, TEXT)


def test_a_window_rewinds_until_it_has_rolled_over(cache: PrefixCache) -> None:
    def window(tokens: np.ndarray[Any, Any]) -> RotatingLayer:
        whole = kv(tokens)
        return RotatingLayer({name: array[:, :, -40:] for name, array in whole.items()}, 40)

    short = TEXT[:40]
    stored(cache, short, [NormalLayer(kv(short)), window(short)])
    assert_right(matched(cache, changed(TEXT, 33)), TEXT, layer=1)
    assert offset_of(cache, TEXT) == 40
    stored(cache, TEXT, [NormalLayer(kv(TEXT)), window(TEXT)])
    assert offset_of(cache, changed(TEXT, 90)) == 40
    longer = matched(cache, np.append(TEXT, np.uint32(7)))
    assert longer.offset == 100 and longer.layers[1] == []
    assert_right(longer, TEXT)
    np.testing.assert_array_equal(longer.joined(1)["k"], kv(TEXT)["k"][:, :, 60:])


def test_tensors_come_back_as_tensors(cache: PrefixCache) -> None:
    # Here, since the process of another test imports this module.
    torch = pytest.importorskip("torch")

    k = torch.arange(100 * 6, dtype=torch.float32).reshape(1, 2, 100, 3).to(torch.bfloat16)
    layers = [NormalLayer((k, k + 1)), NormalLayer(torch.arange(100), axis=0), RecurrentLayer([torch.ones(2)])]
    stored(cache, torch.arange(100), layers)  # type: ignore[arg-type]
    match = matched(cache, torch.arange(101))
    found = match.torch(0)
    assert torch.equal(found[0], k) and torch.equal(found[1], k + 1) and found[0].is_contiguous()
    assert torch.equal(match.torch(1), torch.arange(100)) and torch.equal(match.torch(2)[0], torch.ones(2))
    found[0][:] = 0
    assert torch.equal(match.torch(0)[0], k)
    with pytest.raises(UsageError, match="has 3"):
        match.torch(3)


def test_tokens_may_be_any_whole_numbers_and_buffers_of_words_are_not_copied(cache: PrefixCache) -> None:
    torch = pytest.importorskip("torch")

    stored(cache, TEXT)
    signed = TEXT.astype(np.int32)
    buffer = bytearray(TEXT.tobytes())
    for given in (TEXT, signed, buffer, memoryview(TEXT.data), torch.from_numpy(signed)):
        match = matched(cache, given)
        assert match.offset == 99 and match.remaining.dtype == np.uint32
        assert np.shares_memory(
            match.remaining, np.asarray(given) if given is not buffer else np.frombuffer(buffer, "u4")
        )
    for converted in (
        TEXT.tolist(),
        TEXT.astype(np.int64),
        tuple(TEXT),
        range(1, 101),
        torch.from_numpy(signed).long(),
    ):
        assert offset_of(cache, converted) == 99
    assert matched(cache, np.repeat(TEXT, 2)[::2]).offset == 99


# ---- what is refused


def _bad(name: str) -> dict[str, Any]:
    """A put's arguments, with one mistake."""
    tokens: Any = TEXT[:40]
    good: dict[str, Any] = {"tokens": tokens, "layers": normal(tokens)}
    recurrent = [*normal(tokens), RecurrentLayer(np.ones(2))]
    rolled = RotatingLayer(kv(tokens[-8:]), 8)
    mistakes: dict[str, dict[str, Any]] = {
        "no tokens": {"tokens": []},
        "a token below 0": {"tokens": [*range(39), -5]},
        "a token above 32 bits": {"tokens": [3, 1 << 32, *range(38)]},
        "an array with one above": {"tokens": np.array([7, 1 << 33], np.int64)},
        "a token that is no number": {"tokens": [1, 2.5, *range(38)]},
        "tokens of floats": {"tokens": np.ones(40)},
        "tokens of two sequences": {"tokens": tokens.reshape(2, 20)},
        "bytes that end in a token": {"tokens": bytes(41)},
        "items that overlap": {"media": [picture(3, 5, b"a"), picture(7, 2, b"b")]},
        "an item that begins behind the end": {"media": [picture(40, 1, b"a")]},
        "an item without tokens": {"media": [picture(4, 0, b"a")]},
        "an item of no modality": {"media": [picture(4, 1, b"a", "smell")]},
        "a hash of 8 bytes": {"media": [Media(4, 1, "image", bytes(8))]},
        "an item that is none": {"media": [b"picture"]},
        "a layer that is short": {"layers": [normal(tokens)[0], NormalLayer(kv(tokens[:39]))]},
        "arrays of one layer that differ": {"layers": [NormalLayer({"k": kv(tokens)["k"], "v": kv(tokens[1:])["v"]})]},
        "an axis that is none": {"layers": [NormalLayer(kv(tokens), axis=4)]},
        "layers that are none": {"layers": None},
        "a layer without arrays": {"layers": [NormalLayer({})]},
        "a layer that is none": {"layers": [kv(tokens)]},
        "a window that is too long": {"layers": [RotatingLayer(kv(tokens), 8)]},
        "a window of nothing": {"layers": [RotatingLayer(kv(tokens), 0)]},
        "an array of objects": {"layers": [NormalLayer(np.full((40, 1), None))]},
        "no state anywhere": {"layers": [*normal(tokens), RecurrentLayer(None)]},
        "a snapshot at the end": {"layers": recurrent, "snapshots": {40: [np.ones(2)]}},
        "a snapshot behind the end": {"layers": recurrent, "snapshots": {41: [np.ones(2)]}},
        "a snapshot before the start": {"layers": recurrent, "snapshots": {0: [np.ones(2)]}},
        "a snapshot of two states": {"layers": recurrent, "snapshots": {8: [np.ones(2), np.ones(2)]}},
        "a snapshot that nothing needs": {"snapshots": {8: [np.ones(2)]}},
        "a snapshot without a state": {"layers": recurrent, "snapshots": {8: [None]}},
        "a snapshot's window that is short": {"layers": [rolled], "snapshots": {20: [kv(tokens[:7])]}},
        "a snapshot that no payload can hold": {"layers": recurrent, "snapshots": {8: [np.full(1, None)]}},
        "a negative time": {"cost_ms": -1.0},
        "an agent's name that is too long": {"agent": "a" * 129},
    }
    return good | mistakes[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no tokens", "empty"),
        ("a token below 0", "token 39 is -5"),
        ("a token above 32 bits", "token 1 is 4294967296"),
        ("an array with one above", "token 1 is 8589934592"),
        ("a token that is no number", r"token 1 is 2\.5"),
        ("tokens of floats", "float64"),
        ("tokens of two sequences", r"\[2, 20\]"),
        ("bytes that end in a token", "41"),
        ("items that overlap", r"Media\(start=7.* overlaps Media\(start=3"),
        ("an item that begins behind the end", r"Media\(start=40"),
        ("an item without tokens", r"Media\(start=4"),
        ("an item of no modality", "smell"),
        ("a hash of 8 bytes", r"Media\(start=4.*32 bytes"),
        ("an item that is none", "item 0"),
        ("a layer that is short", r"layer 1 .*39 tokens .*40"),
        ("arrays of one layer that differ", r"layer 0 .*'v'.*39 tokens .*40"),
        ("an axis that is none", "layer 0 .*no axis 4"),
        ("layers that are none", "layers are a NoneType"),
        ("a layer without arrays", "layer 0"),
        ("a layer that is none", "layer 0 is a dict"),
        ("a window that is too long", r"layer 0 .*40 tokens .*8"),
        ("a window of nothing", "layer 0: window is 0"),
        ("an array of objects", "object"),
        ("no state anywhere", "layer 2"),
        ("a snapshot at the end", "position 40"),
        ("a snapshot behind the end", "position 41"),
        ("a snapshot before the start", "position 0"),
        ("a snapshot of two states", "position 8 has 2 states, but 1"),
        ("a snapshot that nothing needs", "position 8 has 1 states, but 0"),
        ("a snapshot without a state", "position 8 has no state for layer 2"),
        ("a snapshot's window that is short", "position 20, layer 0 .*7 tokens .*8"),
        ("a snapshot that no payload can hold", "object"),
        ("a negative time", "cost_ms"),
        ("an agent's name that is too long", "agent"),
    ],
)
def test_arguments_that_do_not_fit_together_are_named_and_nothing_is_stored(
    daemon: Daemon, cache: PrefixCache, name: str, says: str
) -> None:
    before = daemon.store("puts")
    kind = UnsupportedLeaf if says == "object" else BadPrefix if says not in ("cost_ms", "agent") else UsageError
    if "window is 0" in says:
        kind = UsageError
    with pytest.raises(kind, match=says):
        cache.put(**_bad(name))
    assert not cache._client.link.puts.waiting
    assert daemon.store("puts") == before


def _no_tokens(name: str) -> Any:
    torch = pytest.importorskip("torch")

    freed = torch.ones(40, dtype=torch.int32)
    freed.untyped_storage().resize_(0)
    given: dict[str, Any] = {
        "a bfloat16": torch.ones(40, dtype=torch.bfloat16),
        "a tensor without memory": torch.ones(40, dtype=torch.int32, device="meta"),
        "a tensor whose memory was freed": freed,
        "a sparse tensor": torch.eye(4, dtype=torch.int32).to_sparse(),
        "a list of tensors": [torch.ones(2)],
        "bytes with gaps": memoryview(bytes(16))[::2],
        "bytes in rows": memoryview(bytes(16)).cast("B", (4, 4)),
        "an object": object(),
        "a generator": (number for number in range(3)),
        "a set": {1, 2},
        "nothing": None,
        "a number": 5,
        "text": "abc",
        "a tensor of one": torch.tensor(5),
        "an array of objects": np.array([1, object()], np.object_),
    }
    return given[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a bfloat16", "dtype bfloat16; pass"),
        ("a tensor without memory", r"a Tensor \(torch.int32\).* meta.*pass"),
        ("a tensor whose memory was freed", "needs 160 bytes of its storage, which has 0"),
        ("a sparse tensor", r"a Tensor .*[Ss]parse.* pass"),
        ("a list of tensors", r"token 0 is tensor.* whole number"),
        ("bytes with gaps", "not contiguous; pass"),
        ("bytes in rows", r"shape \[4, 4\]"),
        ("an object", "a object, not an array of whole numbers; pass"),
        ("a generator", "a generator, not an array of whole numbers; pass"),
        ("a set", "a set, not"),
        ("nothing", "a NoneType, not"),
        ("a number", "a int, not"),
        ("text", "a str, not"),
        ("a tensor of one", r"shape \[\]; pass"),
        ("an array of objects", "dtype object; pass"),
    ],
)
def test_an_invalid_sequence_of_tokens_is_refused_with_the_remedy(name: str, says: str) -> None:
    with pytest.raises(BadPrefix, match=says):
        tokens_of(_no_tokens(name))


@pytest.mark.parametrize("media", [None, 5, [None], [(1, 2, np.array(["image", "audio"]), bytes(32))]])
def test_an_invalid_list_of_media_is_refused(media: Any) -> None:
    with pytest.raises(BadPrefix, match="media"):
        media_of(media, 9, may_be_cut=False)


def test_a_query_must_hold_its_pictures(cache: PrefixCache) -> None:
    with pytest.raises(BadPrefix, match=r"Media\(start=95.*ends at token 101"):
        cache.match(TEXT, media=[picture(95, 6, b"a")])
    with pytest.raises(BadPrefix, match="empty"):
        cache.match([])
    with pytest.raises(BadPrefix, match="token 2 is -1"):
        cache.match([1, 2, -1])


def test_a_sequence_over_a_limit_is_refused_by_name() -> None:
    with Daemon(limits_prefix_tokens_max=20_000) as daemon:
        cache = PrefixCache(daemon.start().client(), namespace_of(0), block_tokens=BLOCK)
        tokens = np.zeros(20_001, np.uint32)
        for use in (lambda: cache.match(tokens), lambda: cache.put(tokens, [])):
            with pytest.raises(LimitReached, match=r"20001 tokens .*prefix_tokens_max \(20000\)"):
                use()
        with pytest.raises(LimitReached, match="1024 blocks of 16; use block_tokens=32"):
            cache.put(tokens[:20_000], [])
        assert daemon.store("entries") == 0


@pytest.mark.parametrize("block_tokens", [0, 8, 48, 8192, 256.0, True, "256", None])
def test_a_block_has_a_power_of_two_of_tokens(client: tensord.Client, block_tokens: Any) -> None:
    with pytest.raises(BadPrefix, match="power of two"):
        PrefixCache(client, namespace_of(0), block_tokens=block_tokens)


# ---- putting


def test_blocks_that_find_no_room_leave_a_valid_shorter_sequence() -> None:
    with Daemon(ring_bytes=4 * MIB) as daemon:
        client = daemon.start().client()
        cache = PrefixCache(client, namespace_of(0), block_tokens=BLOCK)
        wide = 2048
        tokens = np.arange(64 * BLOCK, dtype=np.uint32)
        put = cache.put(tokens, [NormalLayer(kv(tokens, wide))]).wait(PATIENCE_S)
        assert put.state == "refused" and isinstance(put.error, StoreFull | ParentGone), put
        match = cache.match(tokens)
        found = 0 if match is None else match.offset
        assert found % BLOCK == 0 and found // BLOCK <= put.blocks_stored < put.blocks
        if match is not None:
            np.testing.assert_array_equal(match.joined(0)["k"], kv(tokens[:found], wide)["k"])


def test_a_put_may_wait_for_what_becomes_of_it(cache: PrefixCache) -> None:
    put = cache.put(TEXT, normal(TEXT), wait=True)
    assert put.state == "stored" and put.error is None and "7 blocks, stored" in repr(put)


def test_each_new_block_gets_its_share_of_the_cost_and_the_agent_and_ttl(
    client: tensord.Client, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(cache, TEXT[:32])
    said: list[Any] = []
    real = client.link.puts.put

    def heard(put: tensord.Put, payload: Any, options: Any, deadline: float) -> None:
        said.append(options)
        real(put, payload, options, deadline)

    monkeypatch.setattr(client.link.puts, "put", heard)
    stored(cache, TEXT, agent="planner", cost_ms=68.0, ttl_s=60)
    assert [options.tokens for options in said] == [16, 16, 16, 16, 4]
    assert [options.cost_ms for options in said] == [16, 16, 16, 16, 4]
    assert {(options.agent, options.ttl_s) for options in said} == {("planner", 60)}


@pytest.mark.parametrize("block_tokens", [BLOCK, 64])
def test_the_key_of_each_block_follows_from_its_record(
    client: tensord.Client, namespace: tensord.Namespace, monkeypatch: pytest.MonkeyPatch, block_tokens: int
) -> None:
    heard: list[tuple[bytes, Any]] = []
    real = client.link.puts.put

    def put(own: tensord.Put, payload: Any, options: Any, deadline: float) -> None:
        whole = bytearray(payload.payload_bytes)
        payload.write(memoryview(whole), 0)
        first = aligned(len(payload.header))
        heard.append((own.key, bytes(whole[first : first + options.prefix_bytes])))
        real(own, payload, options, deadline)

    monkeypatch.setattr(client.link.puts, "put", put)
    cache = PrefixCache(client, namespace, block_tokens=block_tokens)
    layers = [*normal(TEXT), RecurrentLayer(np.ones(3))]
    stored(cache, TEXT, layers, media=[picture(10, 20, b"a")], snapshots={40: [np.zeros(3)]})
    assert len(heard) == -(-len(TEXT) // block_tokens) + 2
    for key, record in heard:
        assert key == block_key(namespace.tag, record), PrefixRecord.unpack(record)


# ---- switches


def test_switched_off_it_does_nothing_and_goes_on_where_it_was(daemon: Daemon, cache: PrefixCache) -> None:
    stored(cache, TEXT)
    before = daemon.store("puts")
    cache.enabled = False
    assert cache.match(TEXT) is None
    put = cache.put(TEXT + np.uint32(1), normal(TEXT), wait=True)
    assert put.state == "refused" and "switched off" in str(put.error)
    assert daemon.store("puts") == before
    cache.enabled = True
    assert offset_of(cache, TEXT) == 99


def test_evict_all_counts_what_it_evicts_and_leaves_other_entries(
    client: tensord.Client, namespace: tensord.Namespace, cache: PrefixCache
) -> None:
    key = namespace.key("encoder", "image", b"picture")
    client.put(key, np.ones(4), wait=True)
    other = PrefixCache(client, namespace_of(next(_numbers)), block_tokens=BLOCK)
    stored(other, TEXT)
    stored(cache, TEXT, [*normal(TEXT), RecurrentLayer(np.ones(2))])
    stored(cache, changed(TEXT, 50))
    # Of engines' own snapshots only those that this object stored.
    again = PrefixCache(client, namespace, block_tokens=BLOCK)
    cache.put_snapshot([b"ours"], np.ones(2), wait=True)
    again.put_snapshot([b"theirs"], np.ones(2), wait=True)
    assert cache.evict_all() == 8 + 7 + 1
    assert cache.match(TEXT) is None and cache.evict_all() == 0
    assert cache.snapshot([b"ours"]) is None and cache.snapshot([b"theirs"]) is not None
    assert client.contains(key) and offset_of(other, TEXT) == 99
    assert stored(cache, TEXT).blocks_existed == 0


def test_a_report_about_an_agent_is_sent_without_waiting(
    client: tensord.Client, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    asked: list[Future[Any]] = []
    real = client.link.ask

    def ask(make: Any, timeout_s: float) -> Future[Any]:
        said.append(make(0))
        asked.append(real(make, timeout_s))
        return asked[-1]

    monkeypatch.setattr(client.link, "ask", ask)
    cache.turn_ended("planner", tool_call=True)
    cache.turn_ended("planner")
    cache.finished("planner")
    assert [(message.agent, message.state) for message in said] == [
        ("planner", state) for state in ("tool_call", "turn_ended", "finished")
    ]
    for answer in asked:
        answer.result(PATIENCE_S)
    with pytest.raises(UsageError, match="agent"):
        cache.finished("")


# ---- the daemon


def test_a_daemon_that_is_away_or_stopped_is_a_miss() -> None:
    with Daemon() as daemon:
        client = daemon.start().client()
        cache = PrefixCache(client, namespace_of(0), block_tokens=BLOCK)
        stored(cache, TEXT)
        held = matched(cache, TEXT)
        daemon.pause()
        assert cache.match(TEXT, timeout_s=0.05) is None
        put = cache.put(changed(TEXT, 20), normal(TEXT), timeout_s=0.05)
        assert put.state in ("sent", "lost")
        daemon.resume()
        put.wait(PATIENCE_S)
        until(lambda: offset_of(cache, TEXT) == 99, "an answer")
        daemon.kill()
        until(lambda: not client.connected, "that it has gone")
        assert cache.match(TEXT) is None
        put = cache.put(TEXT, normal(TEXT)).wait(PATIENCE_S)
        assert put.state == "lost" and isinstance(put.error, DaemonUnavailable)
        cache.turn_ended("planner")
        with pytest.raises(TensordError):
            cache.evict_all()
        assert_right(held, TEXT)
        daemon.start()
        until(lambda: offset_of(cache, TEXT) == 99, "what was stored, from the daemon that comes after it")
        assert_right(matched(cache, TEXT), TEXT)


def test_an_answer_that_comes_too_late_is_dropped(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(cache, TEXT)
    assert offset_of(cache, TEXT) == 99
    link = cache._client.link
    asked: list[PendingRequest] = []

    def never(*_: Any, **__: Any) -> PendingRequest:
        asked.append(PendingRequest())
        return asked[-1]

    monkeypatch.setattr(link, "ask", never)
    assert cache.match(TEXT, timeout_s=0.01) is None
    assert asked[0].cancelled()


def test_a_forks_child_asks_for_itself(cache: PrefixCache) -> None:
    stored(cache, TEXT)
    assert offset_of(cache, TEXT) == 99
    child = os.fork()
    if not child:
        os._exit(0 if offset_of(cache, TEXT, timeout_s=PATIENCE_S) == 99 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert offset_of(cache, TEXT) == 99


def test_a_sequence_without_layers_or_with_snapshots_that_are_no_dict_is_refused(cache: PrefixCache) -> None:
    tokens = np.arange(40, dtype=np.uint32)
    with pytest.raises(BadPrefix, match="at least one"):
        cache.put(tokens, [])
    with pytest.raises(BadPrefix, match="pass a dict"):
        cache.put(tokens, [NormalLayer(np.zeros((1, 40, 2), np.float32))], snapshots=[3])  # type: ignore[arg-type]
    assert cache.match(tokens) is None
