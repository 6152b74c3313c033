"""Blocks whose KV may differ have different keys."""

from __future__ import annotations

import pytest

import tensord
from tensord.client.vllm.kv.keys import Chunks, Naming, RequestMedia

NAMESPACE = tensord.Namespace(model="m", revision="1", dtype="float32", processor="p")
BLOCK = bytes(32) + b"\0\0\0\1"
ONE, ANOTHER = b"1" * 32, b"2" * 32


def media(*placed: tuple[int, bytes | None]) -> RequestMedia:
    found = RequestMedia([offset for offset, _ in placed])
    found.settle([digest for _, digest in placed])
    return found


def naming(namespace: tensord.Namespace, ranks: int, of: RequestMedia) -> Naming:
    return Naming(namespace, Chunks(ranks, {1: 64}, [1], 64), of, [])


def keys(of: RequestMedia, end_token: int = 64, *, block: bytes = BLOCK, ranks: int = 1) -> object:
    return naming(NAMESPACE, ranks, of).keys(block, end_token)


UNNAMED = media((10, ONE), (70, None), (90, ONE))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (keys(media((3, ONE))), keys(media((3, ONE)))),
        (keys(media((64, ONE)), 64), keys(media(), 64)),
        (keys(UNNAMED, 64), keys(media((10, ONE)), 64)),
    ],
    ids=["in every process", "a medium that begins at its end", "a medium without a digest behind it"],
)
def test_blocks_that_are_the_same_have_one_key(one: object, other: object) -> None:
    assert one is not None and one == other


@pytest.mark.parametrize(
    "other",
    [
        keys(media((3, ANOTHER))),
        keys(media((4, ONE))),
        keys(media((3, ONE), (9, ANOTHER))),
        keys(media((3, ONE), (63, ONE))),
        keys(media()),
        keys(media((3, ONE)), block=bytes(32) + b"\0\0\0\2"),
        keys(media((3, ONE)), ranks=2),
        naming(NAMESPACE.raised_to(1), 1, media((3, ONE))).keys(BLOCK, 64),
    ],
    ids=["content", "place", "one more", "one more at its end", "none", "group", "ranks", "generation"],
)
def test_blocks_that_differ_in_one_thing_have_other_keys(other: object) -> None:
    assert other is not None
    assert keys(media((3, ONE))) != other


def test_each_ranks_part_has_a_key_of_its_own_in_the_same_namespace() -> None:
    found = naming(NAMESPACE.raised_to(1), 4, media()).keys(BLOCK, 64)
    assert found is not None
    assert len(set(found)) == 4
    assert {(key[:8], key[-4:]) for key in found} == {(NAMESPACE.tag, (1).to_bytes(4, "little"))}


def test_a_medium_without_a_digest_takes_the_key_of_the_blocks_behind_it_alone() -> None:
    assert keys(UNNAMED, 96) is keys(UNNAMED, 128) is None
    waiting = RequestMedia([10])
    assert not waiting.settled
    assert waiting.reach(64) == 1
    assert keys(waiting, 64) is None
    assert keys(waiting, 10) == keys(media(), 10)
