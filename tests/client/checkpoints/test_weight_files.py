"""Digests of weight files: no byte that an encoder may be made of goes unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensord.client.checkpoints.weight_files import LANGUAGE, SAMPLE_BYTES, SAMPLED_BYTES_MIN, weight_file_digest

from .checkpoint_file import HEAD, LAYER, PROJECTOR, TOWER, header_of, write_safetensors

LARGE = SAMPLED_BYTES_MIN * 4


def with_bit_changed(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def test_every_byte_outside_the_language_model_is_in_the_digest(tmp_path: Path) -> None:
    tensors = {PROJECTOR: bytes(LARGE), LAYER: bytes(LARGE), TOWER: bytes(100), "a.new.tensor": bytes(LARGE)}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    digests = {weight_file_digest(path)}
    changed = 0
    for name, content in tensors.items():
        if name == LAYER:
            continue
        for at in range(0, len(content), max(1, len(content) // 97)):
            write_safetensors(path, {**tensors, name: with_bit_changed(content, at)})
            digests.add(weight_file_digest(path))
            changed += 1
    assert len(digests) == changed + 1


@pytest.mark.parametrize("name", [LAYER, HEAD])
def test_each_large_tensor_of_the_language_model_is_sampled_from_its_first_byte_to_its_last(
    tmp_path: Path, name: str
) -> None:
    tensors = {PROJECTOR: bytes(10), name: bytes(LARGE), TOWER: bytes(10)}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    before = weight_file_digest(path)
    for at in (0, SAMPLE_BYTES - 1, LARGE - SAMPLE_BYTES, LARGE - 1, (LARGE - SAMPLE_BYTES) // 3):
        write_safetensors(path, {**tensors, name: with_bit_changed(tensors[name], at)})
        assert weight_file_digest(path) != before
    # The limit that is written down.
    write_safetensors(path, {**tensors, name: with_bit_changed(tensors[name], SAMPLE_BYTES)})
    assert weight_file_digest(path) == before


def test_a_digest_of_the_whole_file_covers_every_byte_of_the_language_model(tmp_path: Path) -> None:
    tensors = {PROJECTOR: bytes(10), LAYER: bytes(LARGE), HEAD: bytes(LARGE)}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    digests = {weight_file_digest(path), weight_file_digest(path, whole=True)}
    for at in range(0, LARGE, LARGE // 97):
        write_safetensors(path, {**tensors, LAYER: with_bit_changed(tensors[LAYER], at)})
        digests.add(weight_file_digest(path, whole=True))
    assert len(digests) == len(range(0, LARGE, LARGE // 97)) + 2


def test_a_small_tensor_of_the_language_model_is_read_whole(tmp_path: Path) -> None:
    content = bytes(SAMPLED_BYTES_MIN - 1)
    path = write_safetensors(tmp_path / "model.safetensors", {LAYER: content})
    before = weight_file_digest(path)
    write_safetensors(path, {LAYER: with_bit_changed(content, SAMPLE_BYTES)})
    assert weight_file_digest(path) != before


@pytest.mark.parametrize("change", ["names", "dtype", "more at the end", "metadata"])
def test_the_header_is_part_of_the_digest(tmp_path: Path, change: str) -> None:
    tensors = {LAYER: bytes(LARGE), HEAD: bytes(LARGE)}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    before = weight_file_digest(path)
    header = header_of(tensors)
    if change == "names":
        header[LAYER], header[HEAD] = header[HEAD], header[LAYER]
    elif change == "dtype":
        header[LAYER]["dtype"] = "I8"
    elif change == "metadata":
        header["__metadata__"]["format"] = "np"
    write_safetensors(path, tensors, header)
    if change == "more at the end":
        path.write_bytes(path.read_bytes() + b"\0")
    assert weight_file_digest(path) != before


def broken_headers() -> dict[str, Any]:
    header = header_of({LAYER: bytes(LARGE), PROJECTOR: bytes(LARGE)})
    overlapping = json.loads(json.dumps(header))
    overlapping[PROJECTOR]["data_offsets"] = [100, 100 + LARGE]
    beyond = json.loads(json.dumps(header))
    beyond[LAYER]["data_offsets"] = [LARGE, LARGE * 5]
    backwards = json.loads(json.dumps(header))
    backwards[LAYER]["data_offsets"] = [LARGE, 0]
    placeless = {**header, LAYER: {"dtype": "U8"}}
    return {"overlapping": overlapping, "beyond": beyond, "backwards": backwards, "placeless": placeless, "list": []}


@pytest.mark.parametrize("kind", list(broken_headers()))
def test_a_file_whose_header_cannot_be_believed_is_read_whole(tmp_path: Path, kind: str) -> None:
    tensors = {LAYER: bytes(LARGE), PROJECTOR: bytes(LARGE)}
    path = write_safetensors(tmp_path / "model.safetensors", tensors, broken_headers()[kind])
    before = weight_file_digest(path)
    for name in tensors:
        changed = {**tensors, name: with_bit_changed(tensors[name], LARGE // 2 + 1)}
        write_safetensors(path, changed, broken_headers()[kind])
        assert weight_file_digest(path) != before


def test_a_header_with_one_name_twice_hides_nothing(tmp_path: Path) -> None:
    about = json.dumps({"dtype": "U8", "shape": [LARGE], "data_offsets": [0, LARGE]})
    header = f'{{"{PROJECTOR}": {about}, "{LAYER}": {about}, "{LAYER}": {about}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(LARGE))
    before = weight_file_digest(path)
    content = path.read_bytes()
    path.write_bytes(with_bit_changed(content, len(content) - LARGE // 2))
    assert weight_file_digest(path) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.pt", "model.tensors"])
def test_files_of_other_formats_are_read_whole(tmp_path: Path, name: str) -> None:
    path = write_safetensors(tmp_path / name, {LAYER: bytes(LARGE)})
    before = weight_file_digest(path)
    write_safetensors(path, {LAYER: with_bit_changed(bytes(LARGE), SAMPLE_BYTES)})
    assert weight_file_digest(path) != before


def test_a_file_hashed_in_many_parts_has_the_digest_that_one_thread_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensord.client.checkpoints import weight_files

    monkeypatch.setattr(weight_files, "_PIECE_BYTES", 1000)
    tensors = {PROJECTOR: bytes(range(256)) * 64, LAYER: bytes(LARGE), TOWER: b"\1" * 4321}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    many = weight_file_digest(path)
    monkeypatch.setattr(weight_files, "_THREADS_MAX", 1)
    assert weight_file_digest(path) == many


def test_names_of_language_models_are_known_and_no_others() -> None:
    of_the_language_model = (
        "language_model.model.layers.0.self_attn.q_proj.weight model.language_model.layers.11.mlp.experts.3.down_proj "
        "model.layers.0.mlp.gate_proj.weight llm.model.layers.0.self_attn.k_proj.weight lm_head.weight "
        "model.text_model.layers.0.mlp.up_proj.weight language_model.lm_head.weight"
    )
    others = (
        "visual.blocks.0.attn.qkv.weight model.visual.merger.mlp.0.weight resampler.kv_proj.weight mlp1.0.weight "
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight vision_model.encoder.layers.0.self_attn.k_proj.weight "
        "audio_tower.layers.0.self_attn.k_proj.weight model.encoder.layers.0.self_attn.k_proj.weight my_lm_head.weight "
        "layers.0.self_attn.q_proj.weight model.qwen2_model.model.model.layers.0.mlp.up_proj.weight "
        "multi_modal_projector.linear_1.weight language_model.model.embed_tokens.weight model.embed_tokens.weight "
        "model.image_newline language_model.model.norm.weight model.layers.0.vision.mlp.weight"
    )
    assert [name for name in of_the_language_model.split() if not LANGUAGE.match(name)] == []
    assert [name for name in others.split() if LANGUAGE.match(name)] == []
