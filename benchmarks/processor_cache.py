"""A processor output of 10 MB at the engine: tensord's receiver beside vLLM's shared-memory receiver, by turns.

    python benchmarks/processor_cache.py [--json PATH] [--megabytes N] [--rounds N] [--calls N] [--quick]

Each cache runs vLLM's own classes on both sides, each side in its own process. The timed call is
`get_and_update_features` of one stored feature (both caches touch the item first), from the call until the engine has
the item with its tensors, and the release. A second figure adds a read of every byte. tensord has two rows: plain
views, the default with an accelerator, and copy-on-write pages, the default on CPUs.

Owns: the processes, the rounds, the table. A missed bar is printed, and does not change the exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from peers import consume, harness, tensord_peer, vllm_peer, worker

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.vllm.tiny_llava import write_tiny_llava

MODEL: Final = "model"
BAR: Final = 0.15
RING_BYTES: Final = 1 << 30
# Together the items are larger than a processor's caches.
ITEMS: Final = 24
VIEWS, ON_WRITE, VLLMS = "tensord, views", "tensord, on write", "vLLM's shm cache"
PEERS: Final = (VIEWS, ON_WRITE, VLLMS)
OPS: Final = ("get", "get_consume")
PATIENCE_S: Final = 60.0

# ---- the sides, each in its own process


def an_item(number: int, megabytes: float) -> Any:
    """A processed picture of that size: pixels, and a small grid."""
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    pixels = torch.full((int(megabytes * 1e6) // 4,), float(number + 1))
    grid = torch.tensor([1, 2, number])
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField()),
            "image_grid_thw": MultiModalFieldElem(data=grid, field=MultiModalBatchedField(keep_on_cpu=True)),
        }
    )


def a_feature(number: int, data: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    hash = hash_of(number)
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=hash, mm_position=PlaceholderRange(0, 1), mm_hash=hash
    )


def hash_of(number: int) -> str:
    """A hash of content, in the form of vLLM's hashes."""
    from vllm.multimodal.hasher import MultiModalHasher

    return str(MultiModalHasher.hash_kwargs("blake3", number=number))


def vllm_config(folder: Path) -> Any:
    """vLLM's configuration of the model in `folder`; tensord's names include all of it."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder / MODEL),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        mm_processor_cache_gb=RING_BYTES / (1 << 30),
        mm_processor_cache_type="shm",
        mm_shm_cache_max_object_size_mb=64,
    ).create_engine_config()


class Sender:
    """Stores the items. Returns the messages that it would send to the engine: vLLM's own bytes, as hex."""

    def __init__(self, peer: str, folder: Path, megabytes: float) -> None:
        from vllm.multimodal.cache import ShmObjectStoreSenderCache

        from tensord.client.vllm.processor.caches import TensordSenderCache
        from tensord.client.vllm.processor.factories import install

        install()
        config = vllm_config(folder)
        if peer == VLLMS:
            self._cache: Any = ShmObjectStoreSenderCache(config)
        else:
            self._cache = TensordSenderCache(config, folder / "control.sock")
            self._cache.cache._sender.wait_s = PATIENCE_S
        self._megabytes = megabytes

    def store(self) -> list[list[str]]:
        from vllm.v1.serial_utils import MsgpackEncoder

        sent = []
        for number in range(ITEMS):
            item, _ = self._cache.get_and_update_item((an_item(number, self._megabytes), updates()), hash_of(number))
            assert "pixel_values" not in item, f"item {number} was not stored"
            sent.append([bytes(part).hex() for part in MsgpackEncoder().encode(item)])
        return sent

    def close(self) -> None:
        self._cache.close()


class Receiver:
    """Reads the items that the sender names, and times itself."""

    def __init__(self, peer: str, folder: Path, megabytes: float) -> None:
        import multiprocessing

        from vllm.multimodal.cache import ShmObjectStoreReceiverCache

        from tensord.client.vllm.processor.caches import TensordReceiverCache

        config = vllm_config(folder)
        if peer == VLLMS:
            lock = multiprocessing.get_context("spawn").Lock()
            self._cache: Any = ShmObjectStoreReceiverCache(config, lock)
        else:
            copy: Literal[False, "on_write"] = False if peer == VIEWS else "on_write"
            self._cache = TensordReceiverCache(config, folder / "control.sock", copy=copy)
        self._bytes = an_item(0, megabytes)["pixel_values"].data.nbytes
        self._sent: list[list[bytes]] = []

    def learn(self, sent: list[list[str]]) -> None:
        """Takes the sender's messages, and reads each item once to check it."""
        self._sent = [[bytes.fromhex(part) for part in parts] for parts in sent]
        for number in range(ITEMS):
            (found,) = self._cache.get_and_update_features([self._feature(number)])
            pixels = found.data["pixel_values"].data.numpy()
            assert pixels.nbytes == self._bytes and (pixels == number + 1).all(), f"item {number} is not as stored"

    def measure(self, op: str, calls: int) -> list[float]:
        """The nanoseconds of each call."""
        update, clock = self._cache.get_and_update_features, time.perf_counter_ns
        samples: list[float] = []
        for call in range(calls):
            features = [self._feature(call % ITEMS)]
            begun = clock()
            found = update(features)[0].data
            if op == "get_consume":
                consume(found["pixel_values"].data.numpy())
            del found
            features[0].data = None
            samples.append(clock() - begun)
        return samples

    def close(self) -> None:
        pass

    def _feature(self, number: int) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItem
        from vllm.v1.serial_utils import MsgpackDecoder

        return a_feature(number, MsgpackDecoder(MultiModalKwargsItem).decode(self._sent[number]))


def updates() -> Any:
    """The place of the picture in a prompt."""
    from vllm.multimodal.processing import PromptReplacement

    return [PromptReplacement("image", [7], [7] * 576).resolve(0)]


def side(peer: str, role: str, folder: Path, megabytes: float) -> Any:
    """One side, in its process."""
    import torch

    torch.set_num_threads(1)  # with two threads on a busy core its copies are hundreds of times slower
    return (Sender if role == "sender" else Receiver)(peer, folder, megabytes)


# ---- the run


def started(peer: str, role: str, folder: Path, megabytes: float) -> harness.Worker:
    """The process of one side."""
    # vLLM names its ring by this variable.
    ours = {"VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": f"bench-{folder.name}", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [vllm_peer.Peer.python(), __file__, "--side", peer, role, str(folder), "--megabytes", str(megabytes)]
    process = harness.Worker(f"{peer}, {role}", command, ours)
    process.ready()
    return process


def run(megabytes: float, rounds: int, calls: int) -> dict[tuple[str, str], list[float]]:
    """The nanoseconds of each call, by peer and operation."""
    samples: dict[tuple[str, str], list[float]] = {(peer, op): [] for peer in PEERS for op in OPS}
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="tensord-bench-") as given, ExitStack() as stack:
        folder = Path(given)
        write_tiny_llava(folder / MODEL)
        stack.enter_context(tensord_peer.serving(RING_BYTES, folder=folder))
        receivers = {}
        for peer in PEERS:
            sender = started(peer, "sender", folder, megabytes)
            stack.callback(sender.close)
            sent = sender.do("store")
            receivers[peer] = started(peer, "receiver", folder, megabytes)
            stack.callback(receivers[peer].close)
            receivers[peer].do("learn", sent=sent)
        for _ in range(rounds):
            for op in OPS:
                for peer in chance.sample(PEERS, len(PEERS)):
                    samples[peer, op] += receivers[peer].do("measure", op=op, calls=calls)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows and ratios there")
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of an item in MB; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=96, help="calls in each sample; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one short round, to check that it runs")
    parser.add_argument("--side", nargs=3, metavar=("PEER", "ROLE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        peer, role, folder = arguments.side
        worker.serve(lambda: side(peer, role, Path(folder), arguments.megabytes))
        return 0
    if (reason := vllm_peer.Peer.missing()) is not None:
        print(f"vLLM is missing: {reason}", file=sys.stderr)
        return 1
    rounds, calls = (1, ITEMS) if arguments.quick else (arguments.rounds, arguments.calls)
    samples = run(arguments.megabytes, rounds, calls)
    figures = {what: np.percentile(found, [50, 99]) / 1e3 for what, found in samples.items()}
    ratios = {
        f"{peer}: {op}": float(figures[peer, op][0] / figures[VLLMS, op][0]) for peer in (VIEWS, ON_WRITE) for op in OPS
    }
    size_bytes = int(arguments.megabytes * 1e6)
    if arguments.json:
        rows = [
            {"peer": peer, "op": op, "bytes": size_bytes, "median_us": round(middle, 2), "p99_us": round(high, 2)}
            for (peer, op), (middle, high) in figures.items()
        ]
        arguments.json.write_text(json.dumps({"rows": rows, "ratios": ratios, "bar": BAR}, indent=1) + "\n")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}; an item of {size_bytes} bytes, {rounds} rounds of {calls} calls\n"
    )
    lines = [[peer, *(f"{figures[peer, op][0]:.1f} /{figures[peer, op][1]:8.1f}" for op in OPS)] for peer in PEERS]
    print(harness.table(["µs: median / p99", "item in hand", "and every byte read"], lines))
    print()
    for name, ratio in ratios.items():
        bar = f"  bar ≤ {BAR} ×, {'reached' if ratio <= BAR else 'missed'}" if name.endswith(": get") else ""
        print(f"{name}: {ratio:.3f} × of {VLLMS}{bar}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
