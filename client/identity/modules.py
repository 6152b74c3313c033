"""What names a model's weights: a hash of their content, taken again when they have changed.

Owns: the fingerprint of some torch modules, and the cheap look at whether it is still theirs. Does not own what else
makes outputs differ: configuration, versions, device.

Invariant: two processes with the same names, dtypes, shapes and bytes have the same fingerprint, wherever the weights
lie and whatever file they came from.

The look sees every operation on a parameter (its version counter), every new storage, and a sample of each tensor's
bytes, for writes that go around the counter (`parameter.data.copy_`, numpy). A write around the counter that leaves all
samples as they were is not seen: `Fingerprint.forget` is for that. Tensors made under `torch.inference_mode()` have no
counter: all of their bytes are compared at each look, and modules with more than 64 KiB of them have no fingerprint.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ...errors import UnsupportedLeaf

__all__ = ["Fingerprint", "tensor_bytes", "tensors_of"]

_SAMPLE_BYTES: Final = 16
_UNCOUNTED_BYTES_MAX: Final = 64 * 1024
"""Of tensors without a version counter. Each call compares all of their bytes: 35 µs (measured) at this limit,
and 0.2 s for an encoder of 100 MiB, which is longer than to encode."""

_log = logging.getLogger("tensord")


class Fingerprint:
    """Of the parameters and buffers of some modules, by name. Safe to use from several threads. Keeps no module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[tuple[int, int, int]] | None = None
        self._samples: list[Any] = []
        self._sampled = b""
        self._digest = ""
        self._told = False

    def current(self, parts: Mapping[str, Any]) -> str:
        """The hash as hex text: SHA-256, over names, dtypes, shapes and bytes of these modules.

        Raises:
            UnsupportedLeaf: a tensor without plain memory, such as a quantised one, or one on the meta device; or more
                than 64 KiB of tensors made under `torch.inference_mode()`.
        """
        with self._lock:
            seen = [_identity(tensor) for part in parts.values() for tensor in tensors_of(part)]
            if seen != self._seen or self._sample() != self._sampled:
                self._seen = None
                self._check_counted(parts)
                self._samples = [sample for part in parts.values() for sample in _samples_of(part)]
                # Before the hash: what is written meanwhile is seen the next time.
                self._sampled = self._sample()
                self._digest = _hashed(parts)
                self._seen = seen
            return self._digest

    def forget(self) -> None:
        """Has the hash taken anew when it is asked for next."""
        with self._lock:
            self._seen = None

    def _check_counted(self, parts: Mapping[str, Any]) -> None:
        tensors = [tensor for part in parts.values() for tensor in tensors_of(part)]
        uncounted = {id(tensor): tensor for tensor in tensors if tensor.is_inference()}
        total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in uncounted.values())
        if total_bytes <= _UNCOUNTED_BYTES_MAX:
            return
        names = " and ".join(type(part).__name__ for part in parts.values())
        text = (
            f"{names}: {total_bytes} bytes of its weights were made under torch.inference_mode(), where torch counts "
            f"no changes (limit {_UNCOUNTED_BYTES_MAX}); nothing of it is shared. Make or load the model outside of "
            "inference_mode(), or under torch.no_grad()"
        )
        if not self._told:
            self._told = True
            _log.warning(text)
        raise UnsupportedLeaf(text)

    def _sample(self) -> bytes:
        by_device: dict[Any, list[Any]] = {}
        for sample in self._samples:
            by_device.setdefault(sample.device, []).append(sample)
        # One call for all tensors of a device: one by one, they would take longer than a small encoder.
        return b"".join(torch.cat(samples).cpu().numpy().tobytes() for samples in by_device.values())


def tensors_of(part: Any) -> Iterator[Any]:
    """A module's parameters and buffers, and those of all modules in it."""
    for module in part.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def tensor_bytes(tensor: Any) -> memoryview:
    """A tensor's bytes in C order, fetched from its device where it is on one.

    Raises:
        UnsupportedLeaf: it has no plain memory.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise UnsupportedLeaf(f"a {type(tensor).__name__} of layout {tensor.layout} has no plain bytes to be known by")
    if tensor.device.type == "meta":
        raise UnsupportedLeaf("a tensor on the meta device has no bytes to be known by; load the weights first")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())


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


def _samples_of(part: Any) -> Iterator[Any]:
    """A few bytes in the middle of each tensor's memory, all bytes where no versions are counted, as (n,) uint8 tensors
    over it."""
    for tensor in tensors_of(part):
        if tensor.numel() == 0:
            continue
        flat = _flat(tensor.detach())
        count = len(flat)
        if not tensor.is_inference():
            count = min(count, max(1, _SAMPLE_BYTES // tensor.element_size()))
        yield flat[(len(flat) - count) // 2 :][:count].view(torch.uint8)


def _flat(tensor: Any) -> Any:
    """A tensor's memory in the order in which it lies, as (n,); with gaps in it, the element in its middle.

    Raises:
        UnsupportedLeaf: there are gaps, and no versions are counted.
    """
    strides = tensor.stride()
    dense = tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    if dense.is_contiguous():
        return dense.view(-1)
    if tensor.is_inference():
        raise UnsupportedLeaf("a tensor with gaps, made under torch.inference_mode(): changes in it cannot be seen")
    middle = sum(stride * (size // 2) for stride, size in zip(strides, tensor.shape, strict=True))
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + middle)
