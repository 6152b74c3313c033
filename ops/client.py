"""A client for trying out containers: gets a made-up embedding, or computes it if no client of the host has yet.

Prints one line, and holds the embedding until it is ended.
"""

import os
import signal
import time

import numpy as np

import tensord

SHAPE = (1024, 1024)
computed_s = 0.0


def compute() -> np.ndarray:
    """Stands for an encoder."""
    global computed_s
    began = time.monotonic()
    made = np.random.default_rng(7).random(SHAPE, np.float32)
    computed_s = time.monotonic() - began
    return made


with tensord.Client() as client:
    connected = client.wait_connected(60)
    namespace = tensord.Namespace(model="made-up", revision="1", dtype="float32", processor="none")
    key = namespace.key("encoder", "image", b"a picture")
    embedding = client.get_or_compute(key, compute)
    how = f"computed in {computed_s:.3f} s" if computed_s else "read from the ring"
    print(f"pid {os.getpid()}: connected: {connected}, embedding {embedding.shape}: {how}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
