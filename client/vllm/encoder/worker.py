"""A worker's side of the connector: copies loads into the encoder cache, and stores the encoder's outputs.

Owns: saves in progress, and the next report. Does not own: decisions. The step's metadata says what to load and what to
store.

Invariants
- A load is a copy: the ring is not read after `load`.
- A ring is mapped before it is reported (engine/rings.py).
- A step waits for no save: an output is kept alive, its copy is queued behind the stream that makes it. Outputs beyond
  SAVE_BYTES_MAX in progress are dropped, and reported as settled.
- No load fails silently: an output that cannot be read is replaced by zeros in the encoder cache, since vLLM needs an
  entry there. The scheduler is told, and ends the requests that use the output.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Final

import torch

from ....errors import TensordError
from ....shm.payloads.tensors import tensor_copy
from ...core.client import Client
from ...link.answers import abandon
from ...link.link import SAY_S
from ...writing.outcomes import Put
from ..engine.background import IDLE_S, SOON_S, Background
from ..engine.presence import engine_client_name
from ..engine.rings import MappedRings
from ..engine.settings import Settings
from .canary import TOLERANCES, difference
from .steps import Load, Report, Save, StepMetadata, ranks_of

SAVE_BYTES_MAX: Final = 512 << 20
SETTLED_S: Final = 30.0
_NO_NEWS: Final = Report()
_log = logging.getLogger("tensord")


class WorkerSide:
    """The worker's side. The first rank stores outputs for all."""

    def __init__(self, vllm_config: Any, settings: Settings) -> None:
        rank = vllm_config.parallel_config.rank
        kind = vllm_config.device_config.device_type
        self._rank = rank % ranks_of(vllm_config)
        self._stores = vllm_config.ec_transfer_config.is_ec_producer
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        # Shared by the threads.
        self._rings = MappedRings()
        self._lock = Lock()
        self._news = Report()
        self._saving_bytes: dict[bytes, int] = {}
        # Used by the step's thread.
        self._loaded = 0
        self._told = b""
        self._began_s = 0.0
        self._step_rows = 1
        # Used by the background thread.
        self._puts: list[tuple[Put, Save, int, float, float]] = []
        self._copies: Any = None
        name = engine_client_name(vllm_config, f"worker {rank}")
        failed = partial(self._tell, errors=1)
        self._background = Background(settings.socket, name, "tensord-vllm-worker", self._tick, failed)
        self._background.start()

    # ---- the step's thread

    def bound(self, metadata: StepMetadata) -> None:
        if metadata.saves:
            self._began_s = time.monotonic()
            self._step_rows = max(metadata.rows, sum(save.rows for save in metadata.saves.values()))

    def load(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Puts the step's loads into the encoder cache."""
        if not metadata.loads:
            return
        for identifier, load in metadata.loads.items():
            try:
                found = self._read(load)
            except Exception:
                _log.exception("tensord: a stored encoder output could not be loaded; its requests end with an error")
                found = None
            if found is None:
                found = torch.zeros(load.shape, dtype=self._dtype, device=self._device)
                self._tell(load_failures=1)
                with self._lock:
                    self._news.failed.add(identifier)
            else:
                self._tell(loads=1, load_bytes=found.nbytes)
            encoder_cache[identifier] = found
        self._loaded = metadata.step

    def save(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor], identifier: str) -> None:
        """Starts to store, or to compare, an output that was just made, if the step says so."""
        output = encoder_cache[identifier].detach()
        wanted = metadata.saves.get(identifier)
        if wanted is None or self._rank or not (self._stores or wanted.check):
            return
        if output.ndim != 2 or output.shape[0] != wanted.rows or output.dtype != self._dtype:
            self._tell(wanted, mismatches=1)
            return
        job = partial(self._store, wanted, output, self._made(), self._began_s, wanted.rows / self._step_rows)
        fits = sum(self._saving_bytes.values()) + output.nbytes <= SAVE_BYTES_MAX
        self._saving_bytes[wanted.key] = output.nbytes
        if not fits or self._background.late or not self._background.post(job):
            self._saving_bytes.pop(wanted.key, None)
            self._tell(wanted, dropped=1)

    def report(self) -> Report | None:
        """The news since the last report; None if there are none."""
        with self._lock:
            news, self._news = self._news, Report()
        if self._loaded:
            news.loaded[self._rank] = self._loaded
            self._loaded = 0
        ring = self._rings.present
        if ring != self._told:
            self._told = news.rings[self._rank] = ring
        return news if news != _NO_NEWS else None

    def close(self) -> None:
        """Ends the thread once queued outputs are stored or given up, then unmaps the rings. Idempotent."""
        self._background.close()
        self._rings.clear()

    def _read(self, load: Load) -> torch.Tensor | None:
        if load.handle is None:
            assert load.payload is not None
            copied: torch.Tensor = tensor_copy(torch, load.payload)
        else:
            lease = self._rings.borrow(load.handle)
            if lease is None:
                return None
            # For a device, the data is copied to it directly from the ring.
            copied = lease.torch(copy=self._device.type == "cpu")
        if tuple(copied.shape) != tuple(load.shape) or copied.dtype != self._dtype:
            return None
        return copied.to(self._device)

    def _made(self) -> Any:
        """An event after the work queued on the step's stream so far; None on the CPU, where that work is done."""
        if self._device.type != "cuda":
            return None
        made = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        made.record()
        return made

    # ---- both threads

    def _tell(self, over: Save | None = None, **counts: int) -> None:
        """Reports these counts, and that the save `over` is over."""
        with self._lock:
            self._news.counts.update(counts)
            if over is not None:
                self._news.settled.append(over.key)

    # ---- the background thread

    def _tick(self, client: Client) -> float:
        if client.connected:
            self._rings.look(client.link.view)
        now = time.monotonic()
        for entry in self._puts.copy():
            put, save, size_bytes, began_s, share = entry
            if put.state == "sent" and now < began_s + SETTLED_S:
                continue
            self._puts.remove(entry)
            if put.state in ("stored", "existed"):
                self._tell(save, saves=1, save_bytes=size_bytes)
                with self._lock:
                    self._news.encoded_rows += save.rows
                    self._news.encode_s += (now - began_s) * share
            else:
                if put.state == "refused":
                    _abandon(save, put.error, client)
                self._tell(save, refused=1)
        return SOON_S if self._puts else IDLE_S

    def _store(self, save: Save, output: torch.Tensor, made: Any, began_s: float, share: float, client: Client) -> None:
        try:
            if save.check:
                self._compare(save.key, self._fetched(output, made), client)
                return
            if not client.connected:
                self._tell(save, refused=1)
                return
            fetched = self._fetched(output, made)
            put = client.store(save.key, fetched, tokens=save.rows, ttl_s=None, claim=save.claim or None)
            self._puts.append((put, save, output.nbytes, began_s, share))
        except (TensordError, RuntimeError) as error:
            _abandon(save, error, client)
            self._tell(save)
            raise
        finally:
            self._saving_bytes.pop(save.key, None)

    def _compare(self, key: bytes, output: torch.Tensor, client: Client) -> None:
        lease = client.get(key)
        if lease is None:
            return
        self._tell(canaries=1)
        by = difference(lease.torch(copy=False), output)
        if by > TOLERANCES.get(self._dtype, 0.0):
            self._tell(canary_failures=1)
            with self._lock:
                self._news.differs.append((key, by))

    def _fetched(self, output: torch.Tensor, made: Any) -> torch.Tensor:
        """The output in host memory, once the step's stream has made it. Only a separate stream waits for that."""
        if made is None:
            return output
        with torch.cuda.device(self._device):
            self._copies = self._copies or torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(made)
                # `output` is referenced until the copy is done, so its memory is not reused meanwhile.
                fetched = output.to("cpu", non_blocking=True)
                self._copies.synchronize()
        return fetched


def _abandon(save: Save, error: BaseException | None, client: Client) -> None:
    """Gives a save's claim up. The scheduler's side learns of it only in its next step, which may be far off."""
    if save.claim:
        with suppress(TensordError):
            client.link.send(abandon(save.claim, error), timeout_s=SAY_S)
