"""Safetensors files for tests: names, places and bytes as a test says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYER = "language_model.model.layers.3.mlp.gate_proj.weight"
HEAD = "language_model.lm_head.weight"
PROJECTOR = "multi_modal_projector.linear_1.weight"
TOWER = "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"


def header_of(tensors: Mapping[str, bytes]) -> dict[str, Any]:
    """A header that places the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at += len(content)
    return header


def write_safetensors(path: Path, tensors: Mapping[str, bytes], header: object = None) -> Path:
    """Writes the file, with the tensors' bytes one after another behind a header, and gives the path back."""
    text = json.dumps(header_of(tensors) if header is None else header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return path
