"""PrefixCache: what of a sequence is found again, what a match holds, and what a put stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensord
from tensord import NormalLayer, PrefixCache, RecurrentLayer, RotatingLayer, SharedLayer
from tensord.errors import UsageError
from tensord.ipc.messages import control as messages

from ...daemon_process import MIB, PATIENCE_S, Daemon
from .sequences import BLOCK, TEXT, assert_right, changed, kv, matched, normal, offset_of, picture, stored


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
            match = cache.match(np.append(tokens, np.uint32(7)), timeout_s=PATIENCE_S)
            assert match is not None and match.offset == 400
            del match


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


def test_views_are_of_the_ring_itself_and_read_only(cache: PrefixCache) -> None:
    stored(cache, TEXT)
    match = matched(cache, changed(TEXT, 57))
    first, *_, last = [part["k"] for part in match.layers[1]]
    assert first.shape == (1, 2, BLOCK, 4) and last.shape == (1, 2, 57 % BLOCK, 4)
    for view in (first, last):
        assert not view.flags.writeable and not view.flags.owndata
    again = matched(cache, TEXT)
    assert np.shares_memory(again.layers[1][0]["k"], first)
    assert match.layers is match.layers
    with pytest.raises(ValueError, match="read-only"):
        first[:] = 0


def test_a_match_that_was_released_says_so(cache: PrefixCache) -> None:
    stored(cache, TEXT)
    match = matched(cache, TEXT)
    assert match.layers
    match.release()
    for use in (lambda: match.layers, lambda: match.snapshot, lambda: match.joined(0), lambda: match.torch(0)):
        with pytest.raises(ValueError, match="released"):
            use()


def test_a_match_evicted_before_it_is_pinned_is_asked_for_again_once(
    cache: PrefixCache, client: tensord.Client
) -> None:
    layers = [*normal(TEXT), RecurrentLayer(np.ones(3))]
    stored(cache, TEXT, layers, snapshots={48: [np.full(3, 48.0)]})
    ask = cache._ask
    deadlines: list[float] = []

    def asked(query: Any, media: Any, agent: str, deadline: float) -> messages.Matched | None:
        deadlines.append(deadline)
        answer = ask(query, media, agent, deadline)
        if answer is not None and len(deadlines) == 1:
            assert answer.offset == 100 and answer.snapshot is not None
            assert client.evict(answer.snapshot) == 1
        return answer

    cache._ask = asked  # type: ignore[method-assign]
    match = matched(cache, np.append(TEXT, np.uint32(7)))
    assert match.offset == 48
    assert_right(match, TEXT)
    assert len(deadlines) == 2 and deadlines[0] == deadlines[1]
    # What is gone again by then is a miss.
    cache._ask = lambda *_: messages.Matched(1, 40, [bytes(32)] * 3)  # type: ignore[method-assign]
    assert cache.match(TEXT) is None


def test_sequences_share_the_blocks_of_their_beginning(daemon: Daemon, cache: PrefixCache) -> None:
    with daemon.client() as client:
        # What other tests have left may expire at any moment.
        client.clear()
    before = daemon.store("entries")
    put = stored(cache, TEXT)
    assert (put.state, put.blocks, daemon.store("entries")) == ("stored", 7, before + 7)
    put = stored(cache, changed(TEXT, 70))
    assert (put.state, put.blocks, daemon.store("entries")) == ("stored", 7, before + 10)
    assert stored(cache, TEXT).state == "existed"
    for tokens in (TEXT, changed(TEXT, 70)):
        assert_right(matched(cache, np.append(tokens, np.uint32(7))), tokens)


def test_caches_with_other_block_sizes_share_matches(
    client: tensord.Client, namespace: tensord.Namespace, cache: PrefixCache
) -> None:
    large = PrefixCache(client, namespace, block_tokens=64)
    assert stored(large, TEXT).blocks == 2
    for asker in (cache, large):
        match = matched(asker, changed(TEXT, 70))
        assert match.offset == 70 and [part["k"].shape[2] for part in match.layers[0]] == [64, 6]
        assert_right(match, TEXT)


def test_blocks_of_arrays_of_another_shape_are_not_joined(cache: PrefixCache) -> None:
    stored(cache, TEXT[:32], [NormalLayer(kv(TEXT[:32], wide=4))])
    stored(cache, TEXT, [NormalLayer(kv(TEXT, wide=8))])
    match = matched(cache, TEXT)
    assert match.offset == 99 and match.joined(0)["k"].shape == (1, 2, 99, 8)


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
    # It rolls over with the first token beyond it.
    stored(cache, rolled := TEXT[:41] + 7, [NormalLayer(kv(rolled)), window(rolled)])
    np.testing.assert_array_equal(matched(cache, TEXT[:42] + 7).joined(1)["k"], kv(rolled)["k"][:, :, 1:])
    assert cache.match(changed(TEXT + 7, 30)) is None


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
