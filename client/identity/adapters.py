"""Names a LoRA adapter by the weights that were loaded, wherever they came from."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...errors import UnsupportedLeaf
from .digest import ALGORITHM, new_digest
from .modules import tensor_bytes

_PLAIN: Final = (bool, int, float, str, type(None))
_NUMBERED: Final = "id"
"""The adapter's number in one engine."""


def adapter_digest(adapter: Any) -> str:
    """The digest of a loaded adapter, as text: the algorithm, then hex.

    Args:
        adapter: a vLLM `LoRAModel`, as it comes from its files.

    Raises:
        UnsupportedLeaf: it has a value that is neither tensor nor number, text, list, dict or an object of these.
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
        raise UnsupportedLeaf(f"an adapter has a {kind.__module__}.{kind.__qualname__}, by which nothing can be named")
