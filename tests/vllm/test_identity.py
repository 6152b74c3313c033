"""Names: the same for the same weights and the same content, another for anything else, none where nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from tensord.client.checkpoints.fingerprint import weights_fingerprint
from tensord.client.identity.content import content_digest
from tensord.errors import UnsupportedLeaf

from .tiny_llava import write_tiny_llava


def item(**fields: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=data, field=MultiModalBatchedField()) for name, data in fields.items()}
    )


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_hub_models_snapshot_has_the_name_of_a_folder_with_its_content(tmp_path: Path) -> None:
    folder = write_tiny_llava(tmp_path / "folder")
    cache = tmp_path / "cache" / "models--some--model"
    write_tiny_llava(cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    for revision in (None, COMMIT):
        named = weights_fingerprint("some/model", revision, download_folder=str(cache.parent))
        assert named == weights_fingerprint(str(folder))
    assert weights_fingerprint("some/model") is None, "it stands in another folder than the usual one"
    assert weights_fingerprint("another/model", download_folder=str(cache.parent)) is None


def test_items_with_equal_content_have_one_digest_whatever_the_order_and_layout() -> None:
    pixels = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    one = item(pixel_values=pixels, sizes=[3, 4])
    same = item(sizes=[3, 4], pixel_values=pixels.t().contiguous().t())
    assert content_digest(one) == content_digest(same)


def test_items_that_differ_in_anything_have_different_digests() -> None:
    pixels = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    bent = pixels.clone()
    bent[2, 3] = 99
    alike: list[Any] = [pixels, bent, pixels.reshape(4, 3), pixels.view(torch.int32), pixels.numpy()]
    alike += [pixels.to(torch.bfloat16), [pixels], [pixels[:1], pixels[1:]]]
    items = [item(pixels=pixels), *(item(pixel_values=data) for data in alike)]
    others = (torch.zeros(1), None, 1, 1.0, "1", torch.tensor(True))
    items += [item(pixel_values=pixels, other=other) for other in others]
    assert len({content_digest(one) for one in items}) == len(items) == 15


@pytest.mark.parametrize(
    "fields", [{"address": 4096, "monotonic_id": 3}, {"pixel_values": torch.zeros(2), "how": object()}, {}]
)
def test_a_placeholder_for_content_has_no_digest(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedLeaf):
        content_digest(item(**fields))
