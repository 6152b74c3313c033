"""Items and prompt updates come back from trees as they were; what would not come back is passed through."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.multimodal.processing import PromptIndexTargets, PromptInsertion, PromptReplacement, PromptUpdateDetails
from vllm.multimodal.processing.processor import PromptIndex, ResolvedPromptUpdate

from tensord.client.vllm.processor.items import item_tree, stored_mask, tree_item, tree_updates
from tensord.errors import UsageError

from .stand import UPDATES, Pair, an_item, fresh


class OneOfItsOwn(MultiModalBatchedField):
    """A field class that vLLM may have some day."""


class Words(torch.Tensor):
    """A tensor that would come back as a plain one."""


def an_item_of(data: Any, field: BaseMultiModalField | None = None) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data=data, field=field or MultiModalBatchedField())})


SOMEWHERE: Final = PromptIndex(lambda prompt, start_idx=0: 3, lambda tokenizer, prompt, start_idx=0: 3)
WHOLE: Final = PromptUpdateDetails(full=[1, 2], is_embed=lambda full: torch.ones(1, dtype=torch.bool))
UNHOLDABLE: dict[str, tuple[MultiModalKwargsItem, list[ResolvedPromptUpdate]]] = {
    "a field class of its own": (an_item_of(torch.ones(2), OneOfItsOwn()), UPDATES),
    "a tensor on a device": (an_item_of(torch.empty(2, device="meta")), UPDATES),
    "a tensor of a class of its own": (an_item_of(torch.ones(2).as_subclass(Words)), UPDATES),
    "a tensor with gradients": (an_item_of(torch.ones(2, requires_grad=True)), UPDATES),
    "a sparse tensor": (an_item_of(torch.eye(2).to_sparse()), UPDATES),
    "an object": (an_item_of([torch.ones(2), object()]), UPDATES),
    "a target that is no known index": (an_item(), [PromptInsertion("image", SOMEWHERE, [1, 2]).resolve(0)]),
    "a mask of another length": (an_item(), [PromptInsertion("image", [1], WHOLE).resolve(0)]),
    "no prompt updates": (an_item(), []),
}


@pytest.mark.parametrize("name", UNHOLDABLE)
def test_an_unknown_object_is_passed_through_and_counted(pair: Pair, name: str) -> None:
    hash, (item, updates) = fresh(), UNHOLDABLE[name]
    sent, their_updates = pair.p0.get_and_update_item((item, updates), hash)
    assert sent is item and their_updates is updates
    assert pair.p0.cache.make_stats().passed_through == {"unsupported": 1}
    assert pair.p0.is_cached([hash]) == [False]


@pytest.mark.parametrize(
    "field",
    [
        MultiModalBatchedField(),
        MultiModalBatchedField(keep_on_cpu=True),
        MultiModalSharedField(batch_size=3),
        MultiModalFlatField(slices=[slice(0, 3), slice(3, 5)]),
        MultiModalFlatField(slices=[[slice(None), slice(0, 2)], [slice(None, None, 2), slice(2, 4)]], dim=1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "data",
    [torch.ones(2, 3, dtype=torch.bfloat16), [torch.ones(2), [torch.zeros(0, 3)]], (torch.tensor(1), 2, 0.5), 7, None],
    ids=["tensor", "nested", "tuple", "number", "nothing"],
)
def test_every_field_and_every_kind_of_data_comes_back(field: BaseMultiModalField, data: Any) -> None:
    item = an_item_of(data, field)
    back = tree_item(item_tree(item, []))
    assert back == item
    assert back["x"].field == field and type(back["x"].data) is type(data)


FULL: Final = [3, 7, 7, 9]
EVERY_OTHER: Final = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    "content",
    [
        PromptUpdateDetails(full=FULL),
        PromptUpdateDetails(full=[]),
        PromptUpdateDetails.select_token_id(FULL, 7),
        PromptUpdateDetails.select_token_ids(FULL, [3, 9]),
        PromptUpdateDetails(full=FULL, is_embed=lambda _: EVERY_OTHER),
    ],
    ids=["all", "none", "one token", "some tokens", "a mask"],
)
def test_contents_and_their_masks_come_back(content: PromptUpdateDetails) -> None:
    update = PromptReplacement("image", [5, 6], content).resolve(2)
    (back,) = tree_updates(item_tree(an_item(), [update]))
    assert (back.modality, back.item_idx, back.mode, back.target) == ("image", 2, update.mode, [5, 6])
    assert back.content.full == content.full
    if content.is_embed is None:
        assert back.content.is_embed is None
    else:
        assert back.content.is_embed is not None
        assert torch.equal(back.content.is_embed(content.full), content.is_embed(content.full))


def test_vllms_own_masks_go_on_to_work_for_other_tokens_and_stored_ones_refuse() -> None:
    update = PromptReplacement("image", [5], PromptUpdateDetails.select_token_id(FULL, 7)).resolve(0)
    (back,) = tree_updates(item_tree(an_item(), [update]))
    assert back.content.is_embed is not None
    assert back.content.is_embed([7, 0]).tolist() == [True, False]
    mask = partial(stored_mask, FULL, EVERY_OTHER)
    mask(FULL).fill_(False)
    assert torch.equal(mask(list(FULL)), EVERY_OTHER)
    with pytest.raises(UsageError, match="asked for 1 others"):
        mask([3])


@pytest.mark.parametrize(
    ("target", "prompt"),
    [
        (PromptIndexTargets.start(), [4, 5]),
        (PromptIndexTargets.end(), [4, 5]),
        (PromptIndexTargets.prefix([4]), [4, 5]),
        (PromptIndexTargets.prefix([4]), [5, 4]),
        ([5], [4, 5, 5]),
    ],
    ids=["start", "end", "prefix", "another prefix", "tokens"],
)
def test_targets_come_back_and_match_where_they_did(target: Any, prompt: list[int]) -> None:
    update = PromptInsertion("image", target, [1]).resolve(0)
    (back,) = tree_updates(item_tree(an_item(), [update]))
    assert list(back.iter_token_matches(prompt)) == list(update.iter_token_matches(prompt))


def test_prompt_updates_may_be_changed_by_whoever_gets_them(pair: Pair) -> None:
    hash = fresh()
    pair.p0.get_and_update_item((an_item(), UPDATES), hash)
    _, updates = pair.p0.get_and_update_item(None, hash)
    updates[0].content.full.append(1)
    assert list(pair.p0.get_and_update_item(None, hash)[1]) == UPDATES
