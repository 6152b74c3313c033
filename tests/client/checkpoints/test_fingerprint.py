"""A model's weights have one name for one content, wherever they lie, and another for anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.client.checkpoints import fingerprint
from tensord.client.checkpoints.fingerprint import weights_fingerprint

from ...vllm.tiny_llava import write_tiny_llava


def test_a_folders_fingerprint_goes_with_its_content_wherever_it_lies(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder, seed in ((one, 0), (same, 0), (other, 1)):
        write_tiny_llava(folder, seed)
    named = weights_fingerprint(str(one))
    assert named is not None
    assert named == weights_fingerprint(str(same))
    assert named != weights_fingerprint(str(other))


@pytest.mark.parametrize(
    "path",
    [
        *("config.json", "preprocessor_config.json", "model.safetensors"),
        *("modeling_tiny.py", "inner/layers.py", "params.json"),
    ],
)
def test_weights_and_the_code_and_settings_beside_them_are_part_of_the_name(tmp_path: Path, path: str) -> None:
    folder = write_tiny_llava(tmp_path)
    before, changed = weights_fingerprint(str(folder)), folder / path
    changed.parent.mkdir(exist_ok=True)
    content = bytearray(changed.read_bytes() if changed.exists() else b"{ }")
    content[-2] ^= 1
    changed.write_bytes(content)
    assert weights_fingerprint(str(folder)) != before


def test_a_single_file_is_named_by_its_content_and_what_has_no_weights_has_no_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    assert weights_fingerprint(str(one)) is None and weights_fingerprint(str(tmp_path)) is None
    one.write_bytes(b"weights")
    other.write_bytes(b"other weights")
    assert weights_fingerprint(str(one)) not in (None, weights_fingerprint(str(other)))


def test_every_byte_of_the_weights_is_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 100)
    path = tmp_path / "model.safetensors"
    content = bytearray(range(250))
    names = set()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        names.add(weights_fingerprint(str(tmp_path)))
    assert len(names) == len(content) and None not in names
