"""What is answered of a sequence: the longest cached prefix to which tokens, media and every layer agree."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest

from tensord.daemon.core.prefix_index import LAYOUTS_MAX, PrefixIndex
from tensord.daemon.core.prefix_query import initial_digest, next_digest
from tensord.daemon.core.prefix_snapshots import LOOKS_MAX
from tensord.daemon.core.prefix_tree import SHELF_MAX
from tensord.errors import BadPrefix, ParentGone
from tensord.ipc.layers import Layer
from tensord.ipc.schema import BLOCKS_MAX
from tensord.shm.prefix import Media, PrefixRecord, fold

from .prefix_stand import SCOPE, TAG, PrefixStand, item, still_to_encode

Make = Callable[..., PrefixStand]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PrefixStand] = []

    def make(**more: int) -> PrefixStand:
        made.append(PrefixStand(**more))
        return made[-1]

    yield make
    for stand in made:
        stand.index.check_invariants()


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def recurrent(length: int, *snapshots: int) -> list[Layer]:
    return [Layer("normal", length), Layer("recurrent", length, snapshots=snapshots)]


# ---- the table of cases


def test_a_rotating_window_that_has_rolled_over_does_not_rewind(make: Make) -> None:
    stand = make()
    stand.put(tokens(1, 10), [Layer("rotating", 10, 4)])
    stand.put([*tokens(1, 5), 9], [Layer("normal", 6)])
    assert stand.ask([*tokens(1, 7), 99]).offset == 5


def test_a_rotating_window_that_has_rolled_over_goes_on_from_its_end(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 10), [Layer("rotating", 10, 4)])
    stand.put([*tokens(1, 5), 9], [Layer("normal", 6)])
    assert stand.ask(tokens(1, 11)) == (10, put.blocks, put.snapshots[10])


def test_an_exact_layout_continues_at_its_snapshot_and_another_at_the_last_common_token(make: Make) -> None:
    stand = make()
    hybrid = stand.put(tokens(1, 8), recurrent(8, 8))
    normal = stand.put([1, 2, 3, 9], [Layer("normal", 4)])
    assert stand.ask([*tokens(1, 8), 10]) == (8, hybrid.blocks, hybrid.snapshots[8])
    assert stand.ask([*tokens(1, 4), 10]) == (3, normal.blocks, None)


def test_no_item_is_cut_of_whatever_modality(make: Make) -> None:
    stand = make()
    media = [item("image", 1, 2), item("audio", 5, 2), item("image", 6, 3)]
    stand.put(tokens(1, 8), media=media)
    found = stand.ask(tokens(1, 9), media)
    assert found.offset == 5
    assert still_to_encode(found.offset, media) == {"image": 1, "audio": 1, "video": 0}


def test_another_picture_cuts_the_match_where_it_begins(make: Make) -> None:
    stand = make()
    stand.put(tokens(1, 12), media=[item("image", 2, 2, 11), item("image", 6, 2, 22)])
    media = [item("image", 2, 2, 11), item("image", 6, 2, 99)]
    found = stand.ask(tokens(1, 12), media)
    assert found.offset == 6
    assert still_to_encode(found.offset, media) == {"image": 1, "audio": 0, "video": 0}


# ---- tokens


def test_the_last_token_is_always_left_to_compute(make: Make) -> None:
    stand = make()
    stand.put(tokens(1, 40))
    assert [stand.ask(tokens(1, n)).offset for n in (40, 33, 32, 17, 16, 2)] == [39, 32, 31, 16, 15, 1]
    assert stand.ask([1]) == stand.ask([]) == (0, [], None)


def test_nothing_matches_where_nothing_is_cached_or_the_first_token_differs(make: Make) -> None:
    stand = make()
    assert stand.ask(tokens(1, 9)).offset == 0
    stand.put(tokens(1, 9))
    assert stand.ask([2, *tokens(2, 9)]).offset == 0


def test_the_longest_of_many_wins(make: Make) -> None:
    stand = make()
    for cut in (5, 30, 18, 60, 2):
        stand.put([*tokens(1, cut), 1000 + cut, *tokens(1, 20)])
    for cut in (3, 17, 31, 59):
        assert stand.ask([*tokens(1, cut), 7, 7]).offset == cut


def test_sequences_share_the_blocks_up_to_where_they_part(make: Make) -> None:
    stand = make()
    one, other = stand.put(tokens(1, 64)), stand.put([*tokens(1, 40), *tokens(1, 24)])
    assert one.blocks[:2] == other.blocks[:2]
    assert len(stand.index) == 6
    assert stand.ask([*tokens(1, 40), 1, 9]).blocks == other.blocks[:3]


def test_a_sequence_is_matched_that_ends_within_a_block_of_another(make: Make) -> None:
    stand = make()
    short = stand.put([*tokens(1, 16), 90])
    long = stand.put([*tokens(1, 16), 90, 91, *tokens(1, 30)])
    assert stand.ask([*tokens(1, 16), 90, 5]).offset == 17
    stand.remove_all(long.blocks[1])
    assert stand.ask([*tokens(1, 16), 90, 5]) == (17, short.blocks, None)


@pytest.mark.parametrize("cut", [1, 1000, 1023, 1024, 1025, 2047, 2048, 2050, 2999])
def test_checkpoints_change_nothing_of_what_matches(make: Make, cut: int) -> None:
    stand = make(block_tokens=64)
    stand.put(tokens(1, 3000))
    for branch in (500, 1024, 1100, 2048, 2500):
        stand.put([*tokens(1, branch), *tokens(7000, 7300)])
    assert stand.ask([*tokens(1, cut), 5, 5, 5]).offset == cut
    assert stand.ask([*tokens(1, 2048), *tokens(7000, 7100), 1]).offset == 2149


@pytest.mark.parametrize("block_tokens", [16, 256, 4096])
def test_blocks_of_every_size_match_to_the_token(make: Make, block_tokens: int) -> None:
    stand = make(block_tokens=block_tokens)
    stand.put(tokens(1, 9000))
    for cut in (1, block_tokens, block_tokens + 1, 8191, 8192, 8193):
        assert stand.ask([*tokens(1, cut), 0]).offset == cut


# ---- media


@pytest.mark.parametrize(
    "other",
    [item("image", 20, 4, 2), item("image", 20, 5, 1), item("audio", 20, 4, 1), item("image", 21, 4, 1), None],
    ids=["content", "length", "modality", "place", "none"],
)
def test_an_item_is_the_same_only_in_all_that_it_says(make: Make, other: Media | None) -> None:
    stand = make()
    first = item("image", 3, 4, 7)
    stand.put(tokens(1, 40), media=[first, item("image", 20, 4, 1)])
    media = [first] if other is None else [first, other]
    assert stand.ask(tokens(1, 40), media).offset == 20
    stand.put(tokens(1, 40), media=media)
    assert stand.ask(tokens(1, 40), media).offset == 39
    assert stand.ask(tokens(1, 40), [first, item("image", 20, 4, 1)]).offset == 39


def test_an_item_that_only_the_query_has_cuts_the_match_where_it_begins(make: Make) -> None:
    stand = make()
    stand.put(tokens(1, 40))
    assert stand.ask(tokens(1, 40), [item("video", 30, 1)]).offset == 30


def test_an_item_that_the_cached_sequence_does_not_have_whole_is_encoded_again(make: Make) -> None:
    stand = make()
    picture = item("image", 30, 40)
    stand.put(tokens(1, 40), media=[picture])
    found = stand.ask(tokens(1, 80), [picture])
    assert found.offset == 30
    assert still_to_encode(found.offset, [picture])["image"] == 1


def test_items_over_many_blocks_match_behind_their_end(make: Make) -> None:
    stand = make()
    media = [item("image", 10, 50), item("audio", 40, 60)]
    stand.put(tokens(1, 120), media=media)
    assert stand.ask([*tokens(1, 110), 0], media).offset == 110
    assert stand.ask([*tokens(1, 99), 0, 0], media).offset == 10
    assert stand.ask([*tokens(1, 70), *[0] * 60], media).offset == 10


def test_tokens_made_to_look_like_anothers_media_do_not_match_behind_them(make: Make) -> None:
    """Folded, the two are the same to the last bit."""
    stand = make(block_tokens=256)
    one, other = item("image", 1030, 8, 1), item("image", 1030, 8, 2)
    plain = np.arange(3000, dtype=np.uint32)
    stand.put(plain.tolist(), media=[one])
    folded = fold(plain, [one])
    for media in ([other], [], [one, item("audio", 2000, 1)]):
        query = PrefixRecord(SCOPE, bytes(16), False, False, 0, 3000, None, tuple(media), 256)
        found = stand.index.match(TAG, query, folded)
        assert found.offset == (2000 if len(media) == 2 else 1030)


# ---- layers


def test_a_window_that_has_not_rolled_over_rewinds_anywhere(make: Make) -> None:
    stand = make()
    stand.put(tokens(1, 30), [Layer("rotating", 30, 30), Layer("shared")])
    assert [stand.ask([*tokens(1, cut), 0]).offset for cut in (1, 16, 29, 30)] == [1, 16, 29, 30]


def test_a_recurrent_layer_goes_on_from_its_last_snapshot_that_the_query_reaches(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 70), recurrent(70, 5, 16, 40, 41, 70))
    for cut, offset in ((80, 70), (70, 41), (69, 41), (40, 16), (42, 41), (39, 16), (15, 5), (5, 0), (4, 0)):
        found = stand.ask(tokens(1, cut))
        assert found.offset == offset
        assert found.snapshot == put.snapshots.get(offset)
        assert found.blocks == put.blocks[: -(-offset // 16)]


def test_a_snapshot_continues_whatever_agrees_up_to_it(make: Make) -> None:
    """Also where the tokens go on in another block than that in which the snapshot stands."""
    stand = make()
    first = stand.put(tokens(1, 32), recurrent(32, 20))
    stand.put([*tokens(1, 24), *tokens(90, 120)], recurrent(55))
    assert stand.ask([*tokens(1, 24), *tokens(90, 130)])[::2] == (20, first.snapshots[20])
    second = stand.put([*tokens(1, 24), *tokens(80, 90)], recurrent(35, 20))
    stand.remove(first.snapshots[20])
    assert stand.ask([*tokens(1, 24), *tokens(90, 130)])[::2] == (20, second.snapshots[20])


def test_no_snapshot_within_an_item_is_continued_from(make: Make) -> None:
    stand = make()
    media = [item("image", 10, 20)]
    put = stand.put(tokens(1, 40), recurrent(40, 5, 10, 20, 29, 30), media)
    assert stand.ask([*tokens(1, 29), *[0] * 9], media)[::2] == (10, put.snapshots[10])
    assert stand.ask([*tokens(1, 35), 0], media)[::2] == (30, put.snapshots[30])


def test_a_match_names_the_snapshot_at_its_offset_even_if_none_is_needed(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 40))
    there = stand.snap(put.blocks[1], 20)
    assert stand.ask([*tokens(1, 20), 0]) == (20, put.blocks[:2], there)
    assert stand.ask([*tokens(1, 21), 0]) == (21, put.blocks[:2], None)


def test_every_layout_is_searched_and_none_is_mixed_with_another(make: Make) -> None:
    stand = make()
    stand.put(tokens(1, 20))
    two = stand.put(tokens(1, 50), [Layer("normal", 50), Layer("normal", 50)])
    rolled = stand.put(tokens(1, 60), [Layer("normal", 60), Layer("rotating", 60, 8)])
    assert len(stand.index) == 2 + 4 + 4 + 1
    assert stand.ask(tokens(1, 100)) == (60, rolled.blocks, rolled.snapshots[60])
    assert stand.ask(tokens(1, 60)) == (50, two.blocks, None)


def test_namespaces_and_their_generations_never_meet(make: Make) -> None:
    stand = make()
    old = stand.put(tokens(1, 20))
    new = stand.put(tokens(1, 30), scope=b"generation two  ")
    stand.put(tokens(1, 40), tag=b"another_")
    assert stand.ask(tokens(1, 50)).blocks == old.blocks
    assert stand.ask(tokens(1, 50), scope=b"generation two  ").blocks == new.blocks
    assert stand.ask(tokens(1, 50), tag=b"another_").offset == 40
    assert stand.ask(tokens(1, 50), tag=b"a third_").offset == 0


# ---- victims, and what goes


def test_a_victim_is_not_matched_unless_it_is_shown_again(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 3000), recurrent(3000, 40, 3000))
    assert stand.index.children(put.blocks[2]) == 2
    stand.hide(put.snapshots[3000])
    assert stand.ask(tokens(1, 3010)).offset == 40
    for key in reversed(put.blocks[3:]):
        stand.hide(key)
    assert stand.index.children(put.blocks[2]) == 1
    stand.hide(put.snapshots[40])
    assert stand.ask(tokens(1, 3010)).offset == 0
    stand.show(put.snapshots[40])
    for key in put.blocks[3:]:
        stand.show(key)
    stand.show(put.snapshots[3000])
    assert stand.ask(tokens(1, 3010)).offset == 3000


def test_removing_a_block_returns_its_children_and_they_are_matched_no_more(make: Make) -> None:
    stand = make(block_tokens=64)
    put = stand.put(tokens(1, 3000))
    branch = stand.put([*tokens(1, 640), *tokens(1, 900)])
    hidden = stand.put([*tokens(1, 640), 5])
    stand.hide(hidden.blocks[-1])
    followed = stand.remove(put.blocks[9])
    assert sorted(followed) == sorted([put.blocks[10], branch.blocks[10], hidden.blocks[-1]])
    assert stand.ask(tokens(1, 3000)).offset == 576
    assert stand.ask([*tokens(1, 640), *tokens(1, 800)]).offset == 576
    assert put.blocks[20] in stand.index
    for key in followed:
        stand.remove_all(key)
    assert len(stand.index) == 9


def test_a_removed_block_can_be_added_again_while_its_children_are_still_known(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 3000))
    rest = stand.remove(put.blocks[1])
    again = stand.put(tokens(1, 32))
    assert again.blocks[1] == put.blocks[1]
    assert stand.ask(tokens(1, 3000)).offset == 32
    with pytest.raises(BadPrefix, match="known"):
        stand.index.add(put.blocks[2], stand.stored[put.blocks[2]].record, 64)
    for key in rest:
        stand.remove_all(key)
    stand.put(tokens(1, 3000))
    assert stand.ask([*tokens(1, 2900), 0]).offset == 2900


def test_removing_leftover_descendants_leaves_the_blocks_put_in_their_place(make: Make) -> None:
    stand = make()
    other = stand.put([0])
    old = stand.put(tokens(1, 5000))
    rest = stand.remove(old.blocks[0])
    new = stand.put(tokens(1, 5000), salt=b"other keys")
    for key in rest:
        stand.remove_all(key)
    stand.reads = 0
    assert stand.ask([*tokens(1, 4100), 0]) == (4100, new.blocks[:257], None)
    assert stand.reads < 10, "from its checkpoint, not from the beginning"
    stand.remove_all(new.blocks[0])
    assert len(stand.index) == 1
    assert stand.ask([0, 1]).blocks == other.blocks


def test_a_removed_blocks_text_is_not_read_for_descendants_that_are_still_known(make: Make) -> None:
    stand = make(block_tokens=64)
    put = stand.put(tokens(1, 960))
    stand.remove(put.blocks[3])
    stand.put(tokens(1, 1100))  # behind the old blocks, which are still known: a checkpoint's stretch with a gap
    assert stand.ask(tokens(1, 1100)).offset == 256


def test_nothing_is_left_once_everything_was_removed(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 1100), recurrent(1100, 7, 1100))
    stand.hide(put.snapshots[7])
    stand.remove_all(put.blocks[0])
    assert len(stand.index) == 0
    assert stand.ask(tokens(1, 1100)).offset == 0


def test_a_snapshot_is_not_found_without_the_block_in_which_it_stands(make: Make) -> None:
    stand = make()
    first = stand.put(tokens(1, 32), recurrent(32, 20))
    stand.put([*tokens(1, 24), *tokens(90, 120)], recurrent(55))
    stand.index.hide(first.blocks[1])
    assert stand.ask([*tokens(1, 24), *tokens(90, 130)]).offset == 0
    stand.index.show(first.blocks[1])
    assert stand.ask([*tokens(1, 24), *tokens(90, 130)]).offset == 20


def test_paths_go_from_the_beginning(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 60), recurrent(60, 33))
    assert stand.index.path(put.blocks[2]) == put.blocks[:3]
    assert stand.index.path(put.snapshots[33]) == [*put.blocks[:3], put.snapshots[33]]


# ---- what does not fit


def blocks(stand: PrefixStand) -> tuple[PrefixRecord, PrefixRecord]:
    """Two that would fit: one behind the first two blocks of what is put, one at the beginning."""
    put = stand.put(tokens(1, 40), media=[item("image", 30, 5)])
    stand.snap(put.blocks[1], 20)
    stand.hide(put.blocks[2])
    first = stand.stored[put.blocks[0]].record
    behind = PrefixRecord(SCOPE, first.layout, False, False, 32, 16, put.blocks[1], (), 16)
    return behind, PrefixRecord(SCOPE, first.layout, False, False, 0, 16, None, (), 16)


def changed(record: PrefixRecord, **more: object) -> PrefixRecord:
    fields = {name: getattr(record, name) for name in PrefixRecord.__slots__}
    return PrefixRecord(**(fields | more))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start": 31}, "begins at token 31"),
        ({"start": 1 << 40}, "begins at token"),
        ({"count": 0}, "0 tokens"),
        ({"count": 17}, "17 tokens"),
        ({"layout": bytes(16)}, "layout"),
        ({"scope": bytes(16)}, "scope"),
        ({"exact": True}, "layout"),
        ({"block_tokens": 32}, "block size"),
        ({"media": (item("image", 34, 2),)}, "overlaps"),
        ({"media": (item("audio", 31, 2),)}, "begin"),
        ({"media": (item("audio", 48, 2),)}, "begin"),
        ({"media": (item("audio", 40, 0),)}, "no tokens"),
        ({"media": (item("audio", 41, 1), item("image", 40, 1))}, "order"),
        ({"media": (item("audio", 40, 2), item("audio", 41, 2))}, "overlaps"),
        ({"snapshot": True}, "no tokens"),
        ({"snapshot": True, "count": 0}, "is stored there|not in its block"),
        ({"snapshot": True, "count": 0, "start": 20}, "is stored there"),
        ({"snapshot": True, "count": 0, "start": 16}, "not in its block"),
        ({"snapshot": True, "count": 0, "start": 33}, "not in its block"),
        ({"snapshot": True, "count": 0, "start": 0, "parent": None}, "stands in a block"),
        ({"parent": None}, "begins at token"),
        ({"parent": None, "start": 0, "block_tokens": 8, "layout": b"o" * 16}, "8 tokens"),
        ({"parent": None, "start": 0, "block_tokens": 48, "layout": b"o" * 16}, "48 tokens"),
        ({"parent": None, "start": 0, "block_tokens": 1 << 40, "layout": b"o" * 16}, "tokens a block"),
    ],
)
def test_a_record_that_does_not_fit_its_parent_is_refused_and_nothing_has_changed(
    make: Make, change: dict[str, object], says: str
) -> None:
    stand = make()
    record = changed(blocks(stand)[0], **change)
    if change == {"snapshot": True, "count": 0}:  # at the block's end, where one may stand: a second may not
        stand.add(TAG + bytes(24), record, np.zeros(0, np.uint32))
    at = stand.write(b"", record, np.arange(record.count, dtype=np.uint32))
    before = len(stand.index), stand.ask(tokens(1, 40))
    with pytest.raises(BadPrefix, match=says):
        stand.index.add(TAG + b"n" * 24, record, at)
    assert (len(stand.index), stand.ask(tokens(1, 40))) == before
    assert TAG + b"n" * 24 not in stand.index
    stand.index.check_invariants()


def test_the_records_that_the_refusal_tests_change_are_accepted_unchanged(make: Make) -> None:
    stand = make()
    behind, root = blocks(stand)
    stand.add(TAG + b"n" * 24, behind, np.arange(16, dtype=np.uint32))
    stand.add(TAG + b"m" * 24, root, np.arange(16, dtype=np.uint32))


def test_a_block_whose_parent_is_not_known_is_refused(make: Make) -> None:
    stand = make()
    behind, _ = blocks(stand)
    partial = stand.put(tokens(50, 60)).blocks[0]
    hidden = next(key for key, stored in stand.stored.items() if stored.hidden)
    snapshot = next(key for key, stored in stand.stored.items() if stored.record.snapshot)
    for key, error in ((bytes(32), ParentGone), (hidden, ParentGone)):
        with pytest.raises(error):
            stand.index.add(TAG + b"n" * 24, changed(behind, parent=key), 64)
    for key, start in ((partial, 11), (partial, 16), (snapshot, 20)):
        with pytest.raises(BadPrefix):
            stand.index.add(TAG + b"n" * 24, changed(behind, parent=key, start=start), 64)
    with pytest.raises(BadPrefix, match="namespace"):
        stand.index.add(b"another_" + b"n" * 24, behind, 64)


def test_an_item_is_refused_that_overlaps_one_of_many_blocks_before(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 64), media=[item("image", 10, 70)])
    last = changed(stand.stored[put.blocks[3]].record, start=64, parent=put.blocks[3])
    for media, fits in ((item("image", 79, 1), False), (item("audio", 79, 1), True), (item("image", 80, 1), False)):
        record = changed(last, media=(media,))
        if fits:
            stand.add(TAG + b"%24d" % media.start, record, fold(np.arange(16, dtype=np.uint32), []))
        else:
            with pytest.raises(BadPrefix, match="overlaps" if media.start == 79 else "begin"):
                stand.index.add(TAG + b"n" * 24, record, 64)


def test_one_block_is_not_stored_under_two_keys(make: Make) -> None:
    stand = make()
    for start in (1, 50, 9, 70):
        put = stand.put(tokens(start, start + 20), media=[item("image", 3, 4)])
    for key in put.blocks:
        stored = stand.stored[key]
        with pytest.raises(BadPrefix, match=key.hex()):
            stand.index.add(TAG + b"n" * 24, stored.record, stored.at)


def test_a_sequence_has_at_most_blocks_max_blocks_and_a_namespace_layouts_max_layouts(make: Make) -> None:
    stand = make()
    put = stand.put(tokens(1, 16 * BLOCKS_MAX))
    last = changed(stand.stored[put.blocks[-1]].record, start=16 * BLOCKS_MAX, parent=put.blocks[-1])
    with pytest.raises(BadPrefix, match=str(BLOCKS_MAX)):
        stand.index.add(TAG + b"n" * 24, last, 64)
    assert len(stand.ask(range(1, 16 * BLOCKS_MAX + 9)).blocks) == BLOCKS_MAX
    for layers in range(2, LAYOUTS_MAX + 1):
        stand.put(tokens(1, 9), [Layer("normal", 9)] * layers)
    with pytest.raises(BadPrefix, match=str(LAYOUTS_MAX)):
        stand.put(tokens(1, 9), [Layer("normal", 9)] * (LAYOUTS_MAX + 1))
    assert len(stand.index) == BLOCKS_MAX + LAYOUTS_MAX - 1


@pytest.mark.parametrize(
    "media",
    [
        [item("image", 5, 10)],
        [item("image", 12, 1)],
        [item("image", 2, 4), item("image", 4, 2)],
        [item("image", 5, 1), item("image", 2, 1)],
        [item("image", 5, 0)],
    ],
)
def test_a_query_whose_media_do_not_fit_it_is_refused(make: Make, media: list[Media]) -> None:
    stand = make()
    stand.put(tokens(1, 12))
    with pytest.raises(BadPrefix, match="image"):
        stand.ask(tokens(1, 12), media)
    query = PrefixRecord(SCOPE, bytes(16), False, False, 0, 12, None, (), 16)
    with pytest.raises(BadPrefix, match="12"):
        stand.index.match(TAG, query, np.arange(11, dtype=np.uint32))


# ---- work and memory


def test_many_siblings_stay_in_their_order_whatever_comes_and_goes(make: Make) -> None:
    stand = make()
    chance = Random(3)
    heads = chance.sample(range(1_000_000), 3 * SHELF_MAX)
    keys = {head: stand.put([head, 1, 2]).blocks[0] for head in heads}
    stand.index.check_invariants()
    for head in heads[::3]:
        stand.hide(keys[head])
        if head % 2:
            stand.show(keys[head])
        else:
            stand.remove(keys.pop(head))
    stand.index.check_invariants()
    for last in (0, 9):  # which stand right before and right behind
        assert all(stand.ask([head, 1, last]).offset == (2 if head in keys else 0) for head in heads)
    for key in keys.values():
        stand.remove(key)
    assert len(stand.index) == 0


def test_a_block_whose_text_in_the_ring_was_overwritten_can_still_be_removed(make: Make) -> None:
    stand = make()
    keys = [stand.put([head, 1, 2]).blocks[0] for head in range(2 * SHELF_MAX)]
    for key in keys[::2]:
        at = stand.stored[key].at
        stand.ring[at : at + 12] = b"\xff" * 12
    for key in keys[::2]:
        stand.remove(key)
    stand.index.check_invariants()
    assert all(stand.ask([head, 1, 9]).offset == 2 * (head % 2) for head in range(2 * SHELF_MAX))


def test_a_match_reads_little_however_much_is_stored(make: Make) -> None:
    stand = make(block_tokens=64)
    trunk = tokens(1, 8000)
    stand.put(trunk)
    for other in range(700):
        stand.put([*trunk[: 64 * (other % 100)], 9000 + other])
    stand.reads = 0
    assert stand.ask([*trunk[:7100], 0]).offset == 7100
    assert stand.reads <= 15 * 8, "at most as many blocks as stand between two checkpoints, and O(log n) for each"


def test_every_layout_is_searched_from_its_checkpoint(make: Make) -> None:
    stand = make()
    for layers in (1, 2, 3):
        stand.put(tokens(1, 5000 + layers), [Layer("normal", 5000 + layers)] * layers)
    stand.reads = 0
    assert stand.ask(tokens(1, 5100)).offset == 5003
    assert stand.reads <= 3 * 64


def test_digests_differ_if_the_digests_before_them_differ_in_any_half() -> None:
    text, before = bytes(4096), initial_digest(3)
    others = [before, before ^ 1, before ^ 1 << 100, initial_digest(4)]
    digests = [next_digest(other, text, b"") for other in others] + [next_digest(before, text, bytes(64))]
    assert len(set(digests)) == len(digests)


def test_a_match_gives_up_after_looks_max_probes_for_snapshots(make: Make) -> None:
    """Positions at which others have snapshots, but not this one: a match gives up rather than hold up the daemon."""
    stand = make(block_tokens=4096)
    put = stand.put(tokens(1, 2 * LOOKS_MAX), recurrent(2 * LOOKS_MAX, 2))
    others = [*tokens(1, 2), *tokens(5000, 5000 + 2 * LOOKS_MAX)]
    other = stand.put(others, recurrent(len(others))).blocks[0]
    for position in range(3, LOOKS_MAX):
        stand.snap(other, position)
    assert stand.ask(tokens(1, 2000))[::2] == (2, put.snapshots[2])
    for position in range(LOOKS_MAX, LOOKS_MAX + 10):
        stand.snap(other, position)
    assert stand.ask(tokens(1, 2000)).offset == 0
    assert stand.ask(others)[0] == LOOKS_MAX + 9


@pytest.mark.parametrize("media", [(), (item("image", 5, 12 * 256),)], ids=["text", "a long video"])
def test_a_node_takes_no_more_than_400_bytes_and_half_a_byte_for_each_of_its_tokens(media: tuple[Media, ...]) -> None:
    ring = np.random.default_rng(1).integers(0, 1 << 32, 300_000, np.uint32).view(np.uint8).data
    index = PrefixIndex(lambda at, size: ring[at : at + size], 1)
    blocks: list[tuple[bytes, PrefixRecord]] = []
    for chain in range(100):
        parent = None
        for number in range(12):
            key = TAG + b"%4d %19d" % (chain, number)
            begun = () if number else media
            blocks.append((key, PrefixRecord(SCOPE, bytes(16), False, False, number * 256, 256, parent, begun, 256)))
            parent = key
    gc.collect()
    tracemalloc.start()
    for number, (key, record) in enumerate(blocks):
        index.add(bytes(bytearray(key)), record, 64 + number * 900)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size <= len(blocks) * (400 + 256 * 0.5) * 0.75
    assert len(index) == 1200
