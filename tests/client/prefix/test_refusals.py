"""PrefixCache: which arguments are taken, which are refused by name, and blocks that do not hold what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensord
from tensord import NormalLayer, PrefixCache, RecurrentLayer, RotatingLayer
from tensord.client.prefix import put as prefix_put
from tensord.client.prefix.layers import cut, tokens_of
from tensord.errors import BadPrefix, Corrupt, LimitReached, UnsupportedLeaf, UsageError
from tensord.shm.payloads.packing import pack
from tensord.shm.payloads.prefix import PrefixRecord

from ...daemon_process import Daemon, some
from .sequences import (
    BLOCK,
    TEXT,
    answer_of,
    changed,
    kv,
    matched,
    namespace_of,
    normal,
    offset_of,
    picture,
    stored,
)

# ---- arguments

TOKENS: Any = TEXT[:40]

RECURRENT = [*normal(TOKENS), RecurrentLayer(np.ones(2))]

ROLLED = RotatingLayer(kv(TOKENS[-8:]), 8)

MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("at least one", {"layers": []}),
    ("pass a dict", {"snapshots": [3]}),
    ("empty", {"tokens": []}),
    ("token 39 is -5", {"tokens": [*range(39), -5]}),
    ("token 1 is 4294967296", {"tokens": [3, 1 << 32, *range(38)]}),
    ("float64; pass", {"tokens": [1, 2.5, *range(38)]}),
    ("float64", {"tokens": np.ones(40)}),
    ("a bytes: .*pass", {"tokens": bytes(41)}),
    (r"Media\(start=7.* overlaps Media\(start=3", {"media": [picture(3, 5, b"a"), picture(7, 2, b"b")]}),
    (r"Media\(start=40", {"media": [picture(40, 1, b"a")]}),
    (r"Media\(start=4", {"media": [picture(4, 0, b"a")]}),
    ("smell", {"media": [picture(4, 1, b"a", "smell")]}),
    (r"layer 1 .*39 tokens .*40", {"layers": [normal(TOKENS)[0], NormalLayer(kv(TOKENS[:39]))]}),
    (r"layer 0 .*'v'.*39 tokens .*40", {"layers": [NormalLayer({"k": kv(TOKENS)["k"], "v": kv(TOKENS[1:])["v"]})]}),
    ("layer 0 .*no axis 4", {"layers": [NormalLayer(kv(TOKENS), axis=4)]}),
    ("layers are a NoneType", {"layers": None}),
    ("layer 0 is a dict", {"layers": [kv(TOKENS)]}),
    (r"layer 0 .*40 tokens .*8", {"layers": [RotatingLayer(kv(TOKENS), 8)]}),
    ("layer 0: window is 0", {"layers": [RotatingLayer(kv(TOKENS), 0)]}),
    ("object", {"layers": [NormalLayer(np.full((40, 1), None))]}),
    ("layer 2", {"layers": [*normal(TOKENS), RecurrentLayer(None)]}),
    ("position 40", {"layers": RECURRENT, "snapshots": {40: [np.ones(2)]}}),
    ("position 0", {"layers": RECURRENT, "snapshots": {0: [np.ones(2)]}}),
    ("position 8 has 2 states, but 1", {"layers": RECURRENT, "snapshots": {8: [np.ones(2), np.ones(2)]}}),
    ("position 8 has 1 states, but 0", {"snapshots": {8: [np.ones(2)]}}),
    ("position 8 has no state for layer 2", {"layers": RECURRENT, "snapshots": {8: [None]}}),
    ("position 20, layer 0 .*7 tokens .*8", {"layers": [ROLLED], "snapshots": {20: [kv(TOKENS[:7])]}}),
    ("object", {"layers": RECURRENT, "snapshots": {8: [np.full(1, None)]}}),
    ("cost_ms", {"cost_ms": -1.0}),
    ("agent", {"agent": "a" * 129}),
]


@pytest.mark.parametrize(("says", "mistake"), MISTAKES)
def test_arguments_that_do_not_fit_together_are_named_and_nothing_is_stored(
    daemon: Daemon, cache: PrefixCache, says: str, mistake: dict[str, Any]
) -> None:
    before = daemon.store("puts")
    kind = UnsupportedLeaf if says == "object" else UsageError
    with pytest.raises(kind, match=says):
        cache.put(**{"tokens": TOKENS, "layers": normal(TOKENS), **mistake})
    assert not cache._client.link.puts.waiting
    assert daemon.store("puts") == before


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


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (memoryview(bytes(16))[::2], "a memoryview: .* not C-contiguous; pass"),
        (np.zeros((4, 4), np.uint32), r"shape \[4, 4\]"),
        ((number for number in range(3)), "a generator of shape"),
        (None, "a NoneType of shape"),
        ("abc", "a str of shape"),
        (np.array([1, object()], np.object_), "dtype object; pass"),
    ],
)
def test_an_invalid_sequence_of_tokens_is_refused_with_the_remedy(tokens: Any, says: str) -> None:
    with pytest.raises(BadPrefix, match=says):
        tokens_of(tokens)


def test_a_tensor_that_is_no_sequence_of_tokens_is_refused_with_the_remedy() -> None:
    torch = pytest.importorskip("torch")

    freed = torch.ones(40, dtype=torch.int32)
    freed.untyped_storage().resize_(0)
    for tokens, says in (
        (torch.ones(40, dtype=torch.bfloat16), "dtype bfloat16; pass"),
        (torch.ones(40, dtype=torch.int32, device="meta"), r"a Tensor: .* meta.*pass"),
        (freed, "needs 160 bytes of its storage, which has 0"),
        (torch.eye(4, dtype=torch.int32).to_sparse(), r"a Tensor: .*[Ss]parse.* pass"),
    ):
        with pytest.raises(BadPrefix, match=says):
            tokens_of(tokens)


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


# ---- blocks that do not hold what they say

Lie = Callable[[Any, Any], dict[str, Any]]

LIES: list[tuple[str, int | None, Lie]] = [
    (
        r"block 1 .*, layer 1: .*'k'.* has not 16 tokens along axis -2;",
        16,
        lambda a, b: {"layers": [a, cut(b, -2, 0, 5)]},
    ),
    (r"block 0 .*, layer 0: .* not 16 tokens", None, lambda a, b: {"layers": [cut(a, -2, 0, 5), cut(b, -2, 0, 5)]}),
    ("has no 'axes' list", None, lambda a, b: {"axes": None}),
    ("layer 1: .* along axis 99", None, lambda a, b: {"axes": [-2, 99]}),
    ("its 1 layers are not those", None, lambda a, b: {"layers": [a]}),
    ("block 2 .*has no 'layers' list", 32, lambda a, b: {"layers": "none"}),
]
"""What is said of a block, where it begins (None: each of them), and what a writer made of its layers."""


@pytest.mark.parametrize(("says", "where", "lie"), LIES)
def test_blocks_that_do_not_hold_what_they_say_are_named_and_never_given(
    client: tensord.Client, cache: PrefixCache, monkeypatch: pytest.MonkeyPatch, says: str, where: int | None, lie: Lie
) -> None:
    def lying(given: dict[str, Any], depth_max: int) -> Any:
        if where in (None, PrefixRecord.unpack(given["prefix"].data).start):
            given = given | lie(*given["layers"])
        return pack(given, depth_max)

    monkeypatch.setattr(prefix_put, "pack", lying)
    stored(cache, TEXT)
    match = matched(cache, changed(TEXT, 57))
    assert match.offset == 57
    for use in (lambda: match.layers, lambda: match.joined(0), lambda: match.torch(0)):
        with pytest.raises(Corrupt, match=says) as error:
            use()
    found = some(re.search(r"block (\d) \((\w+)…\)", str(error.value)))
    block = int(found[1])
    key = answer_of(cache, changed(TEXT, 57)).blocks[block]
    assert key.hex().startswith(found[2])
    client.evict(key)
    assert offset_of(cache, changed(TEXT, 57)) == block * BLOCK
