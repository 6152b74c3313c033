"""Names a model's weights by a hash of their content, computed again when they have changed.

Owns: the fingerprint of torch modules, and the cheap check that it is still valid. Does not own: other causes of
different outputs: configuration, versions, device.

Invariants: two processes with the same names, dtypes, shapes and bytes have the same fingerprint, wherever the weights
lie and whatever file they came from.

The check detects every operation on a parameter (by its version counter), every new storage, and changes of a sample of
each tensor's bytes. The sample is for writes that bypass the counter (`parameter.data.copy_`, numpy). A write that
bypasses the counter and leaves all samples as they were is not detected; make a new `Fingerprint` after it. Modules
with tensors that were made under `torch.inference_mode()`, which have no counter, have no fingerprint.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ...errors import UnsupportedLeaf
from ...shm.payloads.tensors import bytes_of, check_memory

_SAMPLE_BYTES: Final = 16
_PLACE: Final = "a tensor of the weights"


class Fingerprint:
    """The fingerprint of the parameters and buffers of some modules. Thread-safe, and usable in a forked child. Keeps
    no reference to a module."""

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._seen: list[tuple[int, int, int]] | None = None
        self._samples: list[Any] = []
        self._sampled = b""
        self._digest = ""

    def current(self, parts: Mapping[str, Any]) -> str:
        """The fingerprint as hex text: SHA-256 over names, dtypes, shapes and bytes of the tensors. Raises
        UnsupportedLeaf if a tensor has no plain memory, for example a quantised one or one on the meta device, or was
        made under `torch.inference_mode()`."""
        if self._pid != os.getpid():
            # A thread that the child of a fork does not have may hold the lock, and have changed half.
            self._pid, self._lock, self._seen = os.getpid(), threading.Lock(), None
        with self._lock:
            tensors = [tensor for part in parts.values() for tensor in tensors_of(part)]
            seen = [_identity(tensor) for tensor in tensors]
            if seen != self._seen or self._sample() != self._sampled:
                self._seen = None
                if any(tensor.is_inference() for tensor in tensors):
                    raise UnsupportedLeaf(
                        f"weights of {' and '.join(type(part).__name__ for part in parts.values())} were made under "
                        "torch.inference_mode(), where torch counts no changes. Make or load the model outside of "
                        "inference_mode(), or under torch.no_grad()"
                    )
                self._samples = [_sample_of(tensor) for tensor in tensors if tensor.numel()]
                # The samples are taken before the hash, so that the next check detects writes during the hash.
                self._sampled = self._sample()
                self._digest = _hashed(parts)
                self._seen = seen
            return self._digest

    def _sample(self) -> bytes:
        by_device: dict[Any, list[Any]] = {}
        for sample in self._samples:
            by_device.setdefault(sample.device, []).append(sample)
        # One copy for all tensors of a device. Single copies would take longer than a small encoder.
        return b"".join(torch.cat(samples).cpu().numpy().tobytes() for samples in by_device.values())


def tensors_of(part: Any) -> Iterator[Any]:
    """The parameters and buffers of a module and of all its submodules."""
    for module in part.modules():
        yield from (each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None)


def tensor_bytes(tensor: Any) -> memoryview:
    """A tensor's bytes in C order, copied from its device if it is on one. Raises UnsupportedLeaf if the tensor has no
    plain memory, or its memory was freed."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise UnsupportedLeaf(f"a {type(tensor).__name__} of layout {tensor.layout} has no plain bytes to hash")
    if tensor.device.type == "meta":
        raise UnsupportedLeaf("a tensor on the meta device has no bytes to hash; load the weights first")
    return bytes_of(tensor, _PLACE).data


def _hashed(parts: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for part_name in sorted(parts):
        part = parts[part_name]
        named = [*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)]
        for name, tensor in sorted(named, key=lambda pair: str(pair[0])):
            digest.update(f"{part_name}.{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _identity(tensor: Any) -> tuple[int, int, int]:
    # Tensors made under inference_mode have no counter.
    return id(tensor), tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _sample_of(tensor: Any) -> Any:
    """A view of a few bytes in the middle of a tensor, (n,) uint8."""
    check_memory(tensor, _PLACE)
    flat = _flat(tensor.detach())
    count = min(len(flat), max(1, _SAMPLE_BYTES // tensor.element_size()))
    return flat[(len(flat) - count) // 2 :][:count].view(torch.uint8)


def _flat(tensor: Any) -> Any:
    """A tensor's elements in memory order, (n,). For a tensor with gaps, only the element in its middle, (1,)."""
    strides = tensor.stride()
    dense = tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    if dense.is_contiguous():
        return dense.view(-1)
    middle = sum(stride * (size // 2) for stride, size in zip(strides, tensor.shape, strict=True))
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + middle)
