"""Tensors of every kind come back as they were put; a plain one costs at most 12 calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tensord.errors import UnsupportedLeaf
from tensord.shm.packed import write
from tensord.shm.packing import pack
from tensord.shm.recipe import recipe

torch = pytest.importorskip("torch")

from .test_packing import LEAF_CALLS_MAX, calls, packed  # noqa: E402
from .test_tensors import DTYPES, TENSORS, assert_same_tensor, tensor_of  # noqa: E402


@settings(max_examples=200, deadline=None)
@given(TENSORS)
def test_a_tensor_comes_back_as_it_was_put(tensor: Any) -> None:
    header, root = packed({"out": tensor})
    assert_same_tensor(recipe(header).value(root)["out"], tensor)
    header, root = packed([tensor, tensor])
    for found in recipe(header).value(root):
        assert_same_tensor(found, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4, dtype=torch.complex64).conj().imag,
        torch.arange(100.0)[10:20],
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.tensor(1.5),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_odd_tensors_come_back_with_their_values(tensor: Any) -> None:
    for _ in range(2):
        header, root = packed({"a": [1, tensor]})
        assert_same_tensor(recipe(header).value(root)["a"][1], tensor.detach().resolve_conj().contiguous())


@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_freed_before_it_is_copied_is_not_read(grown: bool, dtype: Any) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    pack(tensor)
    payload = pack({"out": [tensor]})
    memory = np.full(payload.payload_bytes, 0xA5, np.uint8)
    storage, before_it_moved = tensor.untyped_storage(), tensor.data_ptr()
    storage.resize_(2 * storage.nbytes() if grown else 0)  # grown: the new memory is allocated before the old is freed
    assert tensor.data_ptr() != before_it_moved
    found = "was allocated anew meanwhile" if grown else "has 0"
    with pytest.raises(UnsupportedLeaf, match=rf"^tree\['out'\]\[0\] is a torch tensor that needs .* which {found}:"):
        write(payload, memory.data, 0)
    assert (memory[64:] == 0xA5).all()
    if not grown:
        with pytest.raises(UnsupportedLeaf, match=r"^tree is a torch tensor that needs .* bytes of its storage"):
            pack(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_tensor_costs_at_most_twelve_calls(dtype: Any) -> None:
    tensors = {f"layer{i}": tensor_of(dtype, (16, 10), i) for i in range(40)}
    memory = memoryview(bytearray(1 << 20))
    write(pack(tensors), memory, 0)
    # A complex tensor may be a conjugate view: one more question.
    assert calls(lambda: write(pack(tensors), memory, 0)) <= (LEAF_CALLS_MAX + dtype.is_complex) * len(tensors)
