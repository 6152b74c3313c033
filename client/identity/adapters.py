"""Names a LoRA adapter by its loaded weights, independent of their source.

Owns: the digest. Does not own: loading. Invariants: adapters with different values have different digests.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ...errors import UnsupportedLeaf
from ..checkpoints.digest import ALGORITHM, new_digest
from .modules import tensor_bytes

_PLAIN: Final = (bool, int, float, str, type(None))
_NUMBERED: Final = "id"
"""The attribute with the adapter's number, which differs from engine to engine and is not part of the digest."""


def adapter_digest(adapter: Any) -> str:
    """The digest of a loaded adapter, as text: the algorithm, then hex.

    Args:
        adapter: a vLLM `LoRAModel`, as loaded from its files.

    Raises:
        UnsupportedLeaf: the adapter has a value that is not a tensor, number, text, list, dict or an object of these.
    """
    digest = new_digest()
    _add(digest, {name: value for name, value in vars(adapter).items() if name != _NUMBERED})
    return f"{ALGORITHM}:{digest.hexdigest()}"


def _add(digest: Any, value: Any) -> None:
    kind = type(value)
    if kind in _PLAIN:
        digest.update(f"{kind.__name__} {value!r}\0".encode())
    elif isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {list(value.shape)}\0".encode())
        digest.update(tensor_bytes(value))
    elif kind in (list, tuple):
        digest.update(f"{kind.__name__} {len(value)}\0".encode())
        for each in value:
            _add(digest, each)
    elif kind is dict:
        digest.update(f"dict {len(value)}\0".encode())
        for name in sorted(value):
            _add(digest, name)
            _add(digest, value[name])
    elif hasattr(value, "__dict__") and not callable(value):
        digest.update(f"{kind.__module__}.{kind.__qualname__}\0".encode())
        _add(digest, vars(value))
    else:
        raise UnsupportedLeaf(f"an adapter has a {kind.__module__}.{kind.__qualname__}, which cannot be part of a name")
