"""Torch tensors of every kind go in, and come out as tensors or views as the reader likes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.errors import UnsupportedLeaf
from tensord.shm.payloads.packing import pack
from tensord.shm.payloads.recipe import Recipe, recipe

from .test_packing import LEAF_CALLS_MAX, calls
from .test_recipe import packed

torch = pytest.importorskip("torch")
FakeTensorMode = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode

DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]
STRIDES: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.permute(tuple(reversed(range(t.ndim)))),
    "every other": lambda t: t[..., ::2] if t.ndim else t,
    "repeated": lambda t: t.expand(2, *t.shape),
    "shifted": lambda t: t[1:] if t.ndim else t,
}


def tensor_of(dtype: Any, shape: tuple[int, ...], seed: int) -> Any:
    """A tensor of any bits."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    bits = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, np.uint8))
    if dtype is torch.bool:
        bits &= 1
    return bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits_of(tensor: Any) -> bytes:
    if not tensor.numel():
        return b""
    whole = tensor.clone(memory_format=torch.contiguous_format)
    return bytes(whole.view(-1).view(torch.uint8).numpy())


TENSORS = st.builds(
    lambda dtype, shape, seed, strides: STRIDES[strides](tensor_of(dtype, shape, seed)),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 1 << 32),
    st.sampled_from(sorted(STRIDES)),
)


def stored(tree: Any, writable: bool = False) -> tuple[Recipe, Any]:
    header, root = packed(tree)
    root.flags.writeable = writable
    return recipe(header), root


def assert_same_tensor(found: Any, put: Any) -> None:
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape, found.device.type) == (put.dtype, put.shape, "cpu")
    assert not found.requires_grad
    assert bits_of(found) == bits_of(put.detach())


@settings(max_examples=200, deadline=None)
@given(st.lists(TENSORS, max_size=4), TENSORS)
def test_tensors_come_back_as_they_were_put(several: list[Any], single: Any) -> None:
    tree = {"several": several, "inner": (single, 1)}
    made, root = stored(tree)
    for found in (made.value(root), made.torch(root), made.torch(root, copy=False)):
        assert list(found) == ["several", "inner"]
        assert type(found["inner"]) is tuple
        assert len(found["several"]) == len(several)
        for mine, theirs in zip(found["several"], several, strict=True):
            assert_same_tensor(mine, theirs)
        assert_same_tensor(found["inner"][0], single)
    made, root = stored(single)
    assert made.single is not None
    assert made.single_is_tensor
    assert_same_tensor(made.value(root), single)
    view = made.view(root)
    assert view.tobytes() == bits_of(single)
    assert view.dtype.name == str(single.dtype).removeprefix("torch.")
    assert view.shape == tuple(single.shape)


def test_numpy_leaves_stay_numpy_in_value_and_are_tensors_in_torch() -> None:
    made, root = stored({"n": np.arange(3, dtype=">i4"), "t": torch.arange(3), "s": "x" * 999})
    value = made.value(root)
    assert type(value["n"]) is np.ndarray
    assert np.shares_memory(value["n"], root)
    assert type(value["t"]) is torch.Tensor
    tensors = made.torch(root)
    assert tensors["n"].dtype is torch.int32
    assert tensors["n"].tolist() == [0, 1, 2]
    assert tensors["s"] == "x" * 999


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("over", ["array", "slice"])
def test_tensors_without_a_copy_lie_in_the_payload_and_keep_it(nested: bool, dtype: Any, over: str) -> None:
    tensor = tensor_of(dtype, (8, 8), 5)
    made, content = stored([tensor] if nested else tensor)
    root = content.copy() if over == "array" else np.tile(content, 3)[len(content) : -len(content)]
    root.flags.writeable = False
    alive = weakref.ref(root)
    found = made.torch(root, copy=False)
    found = found[0] if nested else found
    assert found.data_ptr() == root.ctypes.data + made.leaves[0].offset
    derived = found.view(torch.uint8)[1:]
    del root, found
    gc.collect()
    assert alive() is not None
    assert bytes(derived.contiguous().numpy()) == bits_of(tensor[1:])
    del derived
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("read", ["torch", "value"])
def test_copies_are_the_readers_own_and_let_the_payload_go(read: str) -> None:
    made, root = stored([torch.zeros(100)], writable=True)
    alive = weakref.ref(root)
    found = getattr(made, read)(root)[0]
    found += 1
    assert not root[made.leaves[0].offset :].any()
    del root
    assert alive() is None
    assert found.sum() == 100


def test_copies_are_on_the_cpu_whatever_the_default_device() -> None:
    made, root = stored([torch.ones(3)])
    with torch.device("meta"):
        found = made.value(root)[0]
    assert found.device.type == "cpu"
    assert found.tolist() == [1, 1, 1]


class Tagged(torch.Tensor):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo.*to_dense"),
        (lambda: torch.ones(2, device="meta"), "on meta.*a tensor with values"),
        (lambda: torch.ones(2).as_subclass(Tagged), "Tagged.*as_subclass"),
        (lambda: torch.empty(2, dtype=torch.bits8), "dtype torch.bits8.*uint8"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), r"dtype torch.quint8.*dequantize\("),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"nested torch tensor.*unbind\(\)"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            r"NestedTensor, .*unbind\(\)",
        ),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "FakeTensor, which has no values.* outside of"),
    ],
)
def test_tensors_without_plain_memory_are_refused_by_place(leaf: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=rf"^tree\['a'\]\[1\] is a .*{reason}"):
        pack({"a": [0, leaf()]})


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_what_a_transform_of_torch_computes_with_is_refused() -> None:
    def called(within: Any) -> Any:
        with pytest.raises(UnsupportedLeaf, match=r"^tree\['a'\] is .* without a storage .*torch.func.vmap.*; pass"):
            pack({"a": within})
        return within.sum()

    torch.func.vmap(called)(torch.ones(3, 2))


def resized(tensor: Any, size_bytes: int) -> Any:
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


@pytest.mark.parametrize(
    ("leaf", "needed_bytes", "found_bytes"),
    [
        (lambda: resized(torch.ones(100), 399), 400, 399),
        (lambda: resized(torch.ones(100)[50::7], 300), 400, 300),
        (lambda: resized(torch.ones(1).expand(100), 0), 4, 0),
        (lambda: resized(torch.ones(100, dtype=torch.bfloat16), 0), 200, 0),
    ],
)
def test_a_tensor_whose_memory_was_freed_or_cut_is_refused(
    leaf: Callable[[], Any], needed_bytes: int, found_bytes: int
) -> None:
    says = rf"^tree\['a'\]\[1\] .* needs {needed_bytes} bytes of its storage, which has {found_bytes}: .*; pass"
    with pytest.raises(UnsupportedLeaf, match=says):
        pack({"a": [0, leaf()]})


@pytest.mark.parametrize("array", [np.array(["x"]), np.ones(2, np.longdouble), np.ones(2, "M8[s]")])
def test_a_leaf_that_torch_has_no_dtype_for_is_named(array: Any) -> None:
    made, root = stored({"a": [torch.ones(1), array]})
    for copy in (True, False):
        with pytest.raises(UnsupportedLeaf, match=r"^tree\['a'\]\[1\]: torch .* numpy view"):
            made.torch(root, copy=copy)
    assert type(made.value(root)["a"][1]) is np.ndarray


def test_another_byte_order_cannot_be_had_without_a_copy() -> None:
    made, root = stored([np.arange(3, dtype=">i4")])
    with pytest.raises(UnsupportedLeaf, match=r"^tree\[0\]: .*'>i4'.*as a copy"):
        made.torch(root, copy=False)


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
    made, root = stored({"a": [1, tensor]})
    assert_same_tensor(made.value(root)["a"][1], tensor.detach().resolve_conj().contiguous())


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
        payload.write(memory.data, 0)
    assert (memory[64:] == 0xA5).all()
    if not grown:
        with pytest.raises(UnsupportedLeaf, match=r"^tree is a torch tensor that needs .* bytes of its storage"):
            pack(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_tensor_costs_at_most_twelve_calls(dtype: Any) -> None:
    tensors = {f"layer{i}": tensor_of(dtype, (16, 10), i) for i in range(40)}
    memory = memoryview(bytearray(1 << 20))
    pack(tensors).write(memory, 0)
    # A complex tensor may be a conjugate view: one more question.
    assert calls(lambda: pack(tensors).write(memory, 0)) <= (LEAF_CALLS_MAX + dtype.is_complex) * len(tensors)
