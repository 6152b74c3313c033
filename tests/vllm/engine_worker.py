"""What vLLM imports in each of its workers' processes, as the module of their `worker_extension_cls`.

Owns: the count of what the encoder is given, in a file that any process may read. It has nothing that is called by
vLLM's `collective_rpc`, since that may have changed the weights.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

COUNTS: Final = "ENGINE_COUNTS"
"""The environment's name for the file."""

CARD: Final = "ENGINE_CARD"
"""The environment's name for the fake card that stands for the CPU worker's memory: "FOLDER NAME BYTES"."""

encode_s = 0.0
"""Each run takes so much longer: a real encoder is slower than this model's."""


class Worker:
    """Adds nothing to vLLM's worker."""


def read_count(path: Path) -> int:
    """How many pictures one worker encoded: of several ranks, which encode the same, the busiest."""
    counts: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        process, pictures = line.split()
        counts[process] += int(pictures)
    return max(counts.values(), default=0)


def _watch() -> None:
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration as Llava

    embed = Llava.embed_multimodal
    file = os.open(os.environ[COUNTS], os.O_WRONLY | os.O_APPEND)

    def counted(self: Any, **arguments: Any) -> Any:
        outputs = embed(self, **arguments)
        time.sleep(encode_s)
        os.write(file, f"{os.getpid()} {len(outputs)}\n".encode())
        return outputs

    Llava.embed_multimodal = counted


def _lie_on_a_card() -> None:
    """vLLM's CPU worker ignores a sleep. Here it holds bytes of a fake card until then, and again when it wakes up."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from tensord.client.vllm.engine import sleeping
    from tensord.testing.fake_card import FakeCard

    folder, name, size = os.environ[CARD].split()
    card = FakeCard(folder, name)
    card.occupy(int(size))

    CPUWorker.sleep = lambda self, level=1: card.occupy(0)
    CPUWorker.wake_up = lambda self, tags=None: card.occupy(int(size))
    sleeping.sleeping_bytes = lambda worker: (name, int(size))


if COUNTS in os.environ:
    _watch()
if CARD in os.environ:
    _lie_on_a_card()
