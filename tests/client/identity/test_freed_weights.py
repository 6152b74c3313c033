"""Weights whose memory was freed have no name: whatever lies there now would give them one. A fork has names too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tensord.errors import UnsupportedLeaf

from ...processes import child_says

torch = pytest.importorskip("torch")
modules = pytest.importorskip("tensord.client.identity.modules")
content = pytest.importorskip("tensord.client.identity.content")


@pytest.mark.parametrize("hashed_before", [False, True])
def test_freed_weights_have_no_fingerprint_until_they_are_back(hashed_before: bool) -> None:
    module = torch.nn.Linear(64, 64)
    before = module.weight.detach().clone()
    fingerprint = modules.Fingerprint()
    named = modules.Fingerprint().current({"encoder": torch.nn.Linear(64, 64)})
    if hashed_before:
        named = fingerprint.current({"encoder": module})
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeaf, match="needs 16384 bytes of its storage, which has 0"):
        fingerprint.current({"encoder": module})
    module.weight.untyped_storage().resize_(16384)
    with torch.no_grad():
        module.weight.copy_(before)
    assert (fingerprint.current({"encoder": module}) == named) is hashed_before


def test_an_item_whose_memory_was_freed_has_no_digest() -> None:
    item = {"pixels": SimpleNamespace(data=torch.ones(100))}
    content.content_digest(item)
    item["pixels"].data.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeaf, match=r"pixels is .* which has 0"):
        content.content_digest(item)


def test_a_child_that_was_forked_while_weights_were_hashed_hashes_them_too() -> None:
    module, fingerprint = torch.nn.Linear(4, 4), modules.Fingerprint()
    named = fingerprint.current({"encoder": module})
    with fingerprint._lock:
        assert child_says(lambda: fingerprint.current({"encoder": module}) == named) == 0
