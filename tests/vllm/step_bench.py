"""The connector in steps, without an engine: the scheduler is a few lines, and what it hands around is vLLM's own.

Owns: the order in which a step calls the connector, as vLLM's scheduler and model runner do, and an encoder that is one
multiplication. Requests, features, the manager, the context in which a worker runs, and the aggregation of what workers
say, are vLLM's classes; metadata and reports are pickled on their way.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

from tensord.client.vllm.connector import TensordECConnector
from tensord.client.vllm.engine import weights
from tests.daemon_process import until

from .tiny_llava import WIDTH, write_tiny_llava

ROWS = 16
_numbers = count(1)


@cache
def vllm_config() -> Any:
    """A real configuration, of the tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = EngineArgs(model=str(write_tiny_llava(Path(folder))), dtype="float32", max_model_len=256)
        return arguments.create_engine_config()


def item(number: float, rows: int = ROWS) -> MultiModalKwargsItem:
    """What a processor made of the picture of that number."""
    pixels = torch.full((rows, WIDTH), float(number)) + torch.arange(rows)[:, None]
    return MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())})


def encoded(data: MultiModalKwargsItem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the encoder makes of it, (rows, WIDTH)."""
    pixels: Any = data["pixel_values"].data
    encodings: torch.Tensor = (pixels * 2 + 1).to(dtype)
    return encodings


def feature(data: MultiModalKwargsItem | None, identifier: str, offset: int = 1, rows: int = ROWS) -> Any:
    position = PlaceholderRange(offset=offset, length=rows)
    return MultiModalFeatureSpec(data=data, modality="image", identifier=identifier, mm_position=position)


def request(*pictures: float | Any, **about: Any) -> Request:
    """A request with these pictures: numbers, whose identifiers are made of them, or features."""
    features: list[Any] = []
    for picture in pictures:
        at = 1 + sum(known.mm_position.length + 1 for known in features)
        features.append(
            feature(item(picture), f"picture-{picture}", at) if isinstance(picture, int | float) else picture
        )
    length = 2 + sum(known.mm_position.offset + known.mm_position.length for known in features[-1:])
    return Request(
        request_id=f"request-{next(_numbers)}",
        prompt_token_ids=list(range(length)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        mm_features=features,
        **about,
    )


class Steps:
    """An engine reduced to what the connector sees of it. Use it in a `with`.

    Args:
        socket: the daemon's. Two engines are two clients only if they name it differently: see `other_name`.
        ranks: workers that run in tensor parallel.
        runner: vLLM's model runner whose way of calling the connector is gone: "v1" or "v2".
        capacity: of the engine's own encoder cache, in embeddings.
    """

    def __init__(
        self,
        socket: Path,
        role: str = "ec_both",
        *,
        ranks: int = 1,
        runner: str = "v1",
        capacity: int = 1024,
        dtype: torch.dtype = torch.float32,
        change: Callable[[Any], None] = lambda config: None,
        **settings: Any,
    ) -> None:
        config = copy.deepcopy(vllm_config())
        config.ec_transfer_config = ECTransferConfig(
            ec_connector="TensordECConnector",
            ec_role=role,  # type: ignore[arg-type, unused-ignore]
            ec_connector_extra_config={
                "tensord.socket": str(socket),
                "tensord.revision": "tiny",
                "tensord.wait_s_max": 30,  # a busy machine shares no less
                "tensord.canary": 0,
                **{f"tensord.{name}": value for name, value in settings.items()},
            },
        )
        config.model_config.model = "tiny-llava"  # the folder is gone by now
        config.parallel_config.tensor_parallel_size = ranks
        config.model_config.dtype = dtype
        change(config)
        self.dtype = dtype
        self._runner = runner
        self.connector = TensordECConnector(config, ECConnectorRole.SCHEDULER)
        self.workers = []
        for rank in range(ranks):
            config.parallel_config.rank = rank
            self.workers.append(TensordECConnector(config, ECConnectorRole.WORKER))
        self.caches: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        self.manager = EncoderCacheManager(cache_size=capacity)
        self.requests: dict[str, Request] = {}
        self.encoded: list[str] = []
        """Identifiers, in the order in which the encoder ran."""
        self.failed: set[str] = set()
        self.counts: dict[str, float] = {}
        self.has_blocks = True
        """Whether there is room for a request's own tokens."""

    # ---- requests

    def add(self, asked: Request) -> Request:
        self.requests[asked.request_id] = asked
        return asked

    def finish(self, *ended: Request) -> None:
        """They end, in whatever state they are."""
        for asked in ended:
            del self.requests[asked.request_id]
            self.connector.request_finished(asked)
            self.manager.free(asked)

    def reset(self, *, weights_kept: bool = False) -> None:
        """Its caches are reset."""
        with weights._resetting(weights_kept):
            self.manager.reset()

    def run(self, *asked: Request) -> list[list[torch.Tensor]]:
        """Steps until these requests have their embeddings, ends them, and gives the embeddings of each."""
        for one in asked:
            self.add(one)
        results = answers([self], *asked)
        self.finish(*asked)
        return results

    # ---- a step, whole and in its parts

    def step(self, between: Callable[[], object] = lambda: None) -> dict[str, list[torch.Tensor]]:
        """One step, with something that happens between the scheduler's part and the workers'.

        Returns:
            By request that was scheduled for the first time: its embeddings, as the first rank's model sees them.
        """
        scheduled = self.schedule()
        between()
        results, reported = self.execute(scheduled)
        self.update(scheduled, reported)
        return results

    def schedule(self) -> SchedulerOutput:
        made = SchedulerOutput.make_empty()
        for asked in self.requests.values():
            if not self.connector.ensure_cache_available(asked, asked.num_computed_tokens):
                continue
            if asked.num_computed_tokens:
                made.num_scheduled_tokens[asked.request_id] = 1
                continue
            plan = self._plan(asked)
            if plan is None or not self.has_blocks:
                self.manager.free(asked)
                continue
            encodes, loads, same = plan
            for index in [*encodes, *loads]:
                self.manager.allocate(asked, index)
                self.connector.update_state_after_alloc(asked, index)
            for index in same:
                self.manager.check_and_update_cache(asked, index)
            made.num_scheduled_tokens[asked.request_id] = asked.num_tokens
            made.scheduled_encoder_inputs[asked.request_id] = encodes
        made.total_num_scheduled_tokens = sum(made.num_scheduled_tokens.values())
        made.free_encoder_mm_hashes = self.manager.get_freed_mm_hashes()
        made.ec_connector_metadata = self.connector.build_connector_meta(made)
        return made

    def execute(self, made: SchedulerOutput) -> tuple[dict[str, list[torch.Tensor]], Any]:
        """All workers' part. Gives the embeddings, and the workers' words in one."""
        outputs: list[ModelRunnerOutput | None] = []
        results: dict[str, list[torch.Tensor]] = {}
        for worker, cached in zip(self.workers, self.caches, strict=True):
            sent = pickle.loads(pickle.dumps(made))
            results, said = self._execute(worker, cached, sent)
            outputs.append(pickle.loads(pickle.dumps(ModelRunnerOutput.with_ec_conn_output_only(said))))
        one = ECOutputAggregator().aggregate(outputs)
        return results, None if one is None else one.ec_connector_output

    def update(self, made: SchedulerOutput, reported: Any) -> None:
        """The scheduler takes the workers' words in."""
        for request_id in self.connector.take_unavailable_requests():
            self.failed.add(request_id)
            self.finish(self.requests[request_id])
        if reported is not None:
            self.connector.update_connector_output(reported)
        stats = self.connector.get_ec_connector_stats()
        if stats is not None:
            for name, amount in stats.data.items():
                self.counts[name] = self.counts.get(name, 0) + amount
        for request_id, tokens in made.num_scheduled_tokens.items():
            if request_id in self.requests:
                self.requests[request_id].num_computed_tokens += tokens

    def _plan(self, asked: Request) -> tuple[list[int], list[int], list[int]] | None:
        encodes, loads, same = list[int](), list[int](), list[int]()
        planned: dict[str, int] = {}
        for index, wanted in enumerate(asked.mm_features):
            if wanted.identifier in planned:
                same.append(index)
            elif not self.manager.check_and_update_cache(asked, index):
                if not self.manager.can_allocate(asked, index, 1 << 20, sum(planned.values())):
                    return None
                hit = self.connector.has_cache_item(wanted.identifier)
                (loads if hit else encodes).append(index)
                planned[wanted.identifier] = wanted.mm_position.get_num_embeds()
        return encodes, loads, same

    def _execute(self, worker: Any, cached: dict[str, torch.Tensor], made: SchedulerOutput) -> Any:
        for identifier in made.free_encoder_mm_hashes:
            cached.pop(identifier, None)
        ec_transfer_state._EC_CONNECTOR_AGENT = worker
        results: dict[str, list[torch.Tensor]] = {}
        try:
            with self._context(made, cached) as said:
                for request_id, indices in made.scheduled_encoder_inputs.items():
                    for index in indices:
                        wanted = self.requests[request_id].mm_features[index]
                        assert wanted.data is not None
                        self.encoded += [wanted.identifier] if worker is self.workers[0] else []
                        cached[wanted.identifier] = encoded(wanted.data, self.dtype)
                        if self._runner == "v1":
                            ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(cached, wanted.identifier)
                for request_id in made.scheduled_encoder_inputs:
                    wanted = self.requests[request_id].mm_features if worker.is_consumer else []
                    # What is missing here ends an engine.
                    results[request_id] = [cached[one.identifier].clone() for one in wanted]
        finally:
            ec_transfer_state._EC_CONNECTOR_AGENT = None
        return results, said

    def _context(self, made: SchedulerOutput, cached: dict[str, torch.Tensor]) -> Any:
        """What a model runner is in while it encodes. The second one saves what is new in the cache when it is left."""
        if self._runner == "v1":
            return ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(made, encoder_cache=cached)
        from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

        return ActiveECConnector(None, cached).maybe_get_output(made)  # type: ignore[arg-type, unused-ignore]

    # ---- its end

    @property
    def held(self) -> dict[str, int]:
        """What the connector holds for requests and steps."""
        side = self.connector._scheduler
        assert side is not None
        inputs = [found for asking in side._asking.values() for found in asking.inputs.values()]
        return {
            "requests": len(side._asking),
            "inputs": len(inputs),
            "leases": sum(found.lease is not None for found in inputs),
            "claims": len(side._claims._wanted) + len(side._claims._saving),
            "steps": len(side._plan.in_progress),
        }

    def close(self) -> None:
        for connector in (self.connector, *self.workers):
            connector.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attached(engine: Steps) -> Steps:
    """The engine, once the daemon is there for it and all of its workers have mapped the ring."""
    side = engine.connector._scheduler
    assert side is not None
    until(lambda: engine.step() is not None and len(side._plan.rings) == len(engine.workers), "workers to map the ring")
    return engine


def answers(engines: Sequence[Steps], *asked: Request) -> list[list[torch.Tensor]]:
    """Steps the engines in turn until these requests have their embeddings, which it gives."""
    results: dict[str, list[torch.Tensor]] = {}

    def stepped() -> bool:
        for engine in engines:
            results.update(engine.step())
        return all(one.request_id in results for one in asked)

    until(stepped, "answers")
    return [results[one.request_id] for one in asked]


def other_name(socket: Path, number: int) -> Path:
    """The same socket by another name: its users are a client of their own, as those of another process are."""
    name = socket.with_name(f"other-{number}.sock")
    if not name.is_symlink():
        name.symlink_to(socket)
    return name


def right(asked: Sequence[Request], results: list[list[torch.Tensor]], dtype: torch.dtype = torch.float32) -> bool:
    """Whether each request got what the encoder makes of its own pictures."""
    return all(
        torch.equal(found, encoded(wanted.data, dtype))
        for one, founds in zip(asked, results, strict=True)
        for wanted, found in zip(one.mm_features, founds, strict=True)
        if wanted.data is not None
    )
