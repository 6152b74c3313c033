"""Which hashes of vLLM's are noted as following from content: vLLM's own hasher and inputs, without cache or engine."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser, VideoProcessorItems
from vllm.multimodal.processing.inputs import ProcessorInputs

from tensord.client.vllm.processor.hashes import follows_from_content, note, note_hashes

FRAMES: Final = np.zeros((2, 8, 8, 3), np.uint8)
METADATA: Final = {"fps": 2.0, "frames_indices": [0, np.int64(1)], "video_backend": "opencv"}
PATH: Final = {"ov2_codec_video": "/videos/of/today.mp4"}


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", ProcessorInputs.get_mm_hashes)
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", MultiModalHasher.hash_kwargs)
    note_hashes()


def a_picture(**info: Any) -> Image.Image:
    made = Image.new("RGB", (4, 4), (1, 2, 3))
    made.info.update(info)
    return made


def with_id() -> Image.Image:
    made = a_picture()
    made.getexif()[ExifTags.Base.ImageID] = uuid.uuid4()
    return made


CHUNK: Final = {"type": "video_chunk", "video_chunk": [a_picture()], "uuid": "u-0", "prompt": "p", "video_idx": 0}
COVERED: Final[dict[str, Any]] = {
    "a picture": a_picture(),
    "a picture's file": MediaWithBytes(a_picture(), b"file"),
    "a picture's file, converted": MediaWithBytes(a_picture(), b"file", {"image_mode": "RGB"}),
    "an array": np.zeros(3, np.float32),
    "a number": np.asarray(1.0),
    "a tensor": torch.zeros(3, dtype=torch.bfloat16),
    "a video's file": MediaWithBytes(FRAMES, b"file"),
    "a video's file and metadata": (MediaWithBytes(FRAMES, b"file"), METADATA),
    "frames and metadata": (FRAMES, METADATA),
    "a chunk": CHUNK,
}
NOT_COVERED: Final[dict[str, Any]] = {
    "a name": "a client's name",
    "a picture with an id": with_id(),
    "a picture's file with an id": MediaWithBytes(with_id(), b"file"),
    "a chunk with an id": {"type": "image", "image": with_id(), "uuid": None},
    "a transparent colour": a_picture(transparency=(1, 2, 3)),
    "fewer frames than the file has bytes": MediaWithBytes(FRAMES, bytes(FRAMES.nbytes + 1)),
    "a video's path": (FRAMES, PATH),
    "objects": np.array([[object()] * 2] * 2)[:, :1],
    "an integer that has no 64 bits": {"seed": 1 << 64},
    "a path": Path("/pictures/of/today.png"),
    "a class": [dict],
}


@pytest.mark.parametrize("name", [*COVERED, *NOT_COVERED])
def test_a_hash_of_all_that_a_processor_reads_follows_from_content_and_of_less_does_not(name: str) -> None:
    item = COVERED.get(name, NOT_COVERED.get(name))
    assert follows_from_content(MultiModalHasher.hash_kwargs("blake3", model_id="m", image=item)) == (name in COVERED)


@pytest.mark.parametrize("follows", [True, False])
def test_a_hash_of_a_hash_follows_from_content_if_that_does(follows: bool) -> None:
    note("a hash", follows)
    assert follows_from_content(MultiModalHasher.hash_kwargs("blake3", mm_hash="a hash", fps=2.0)) == follows


def hashed(modality: str, items: ModalityDataItems[Any, Any], names: list[str | None] | None = None) -> list[str]:
    inputs = ProcessorInputs(
        [],
        MultiModalDataItems({modality: items}),
        {modality: names} if names is not None else None,
        hf_processor_mm_kwargs={"do_resize": False} if names is not None else {},
    )
    return list(inputs.get_mm_hashes("m", "blake3")[modality])


@pytest.mark.parametrize("needs_metadata", [False, True], ids=["left out", "hashed too"])
def test_a_videos_metadata_that_is_not_hashed_makes_its_hash_follow_from_less_than_its_content(
    needs_metadata: bool,
) -> None:
    parser = MultiModalDataParser(video_needs_metadata=needs_metadata)
    videos = parser.parse_mm_data({"video": [(FRAMES, METADATA)]})["video"]
    assert list(map(follows_from_content, hashed("video", videos))) == [needs_metadata]
    file = parser.parse_mm_data({"video": [MediaWithBytes((FRAMES, METADATA), b"file")]})["video"]
    assert list(map(follows_from_content, hashed("video", file))) == [True]


def test_a_clients_name_does_not_follow_from_content_though_it_is_a_hash_of_content() -> None:
    videos = VideoProcessorItems([FRAMES, FRAMES], metadata=[None, None])
    content, name = hashed("video", videos, [None, "a name"])
    assert follows_from_content(content) and not follows_from_content(name)
    other = MultiModalDataItems({"video": VideoProcessorItems([FRAMES + 1])})
    inputs = ProcessorInputs([], other, {"video": [content]})
    assert inputs.get_mm_hashes("m", "blake3") == {"video": [content]}
    assert not follows_from_content(content)
