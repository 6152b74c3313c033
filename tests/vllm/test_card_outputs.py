"""A worker keeps encoder outputs on its card, and serves them from there: steps without an engine, and one engine.

The card is a stand-in for torch.cuda, whose memory a daemon watches through the file of a fake card.

| disturbance            | on the card                    | on the ring only        | absent                  |
|------------------------|--------------------------------|-------------------------|-------------------------|
| none                   | served_from_the_card           | loaded_and_then_kept    | served_from_the_card    |
| the daemon is killed   | killed_daemon                  | killed_daemon           | killed_daemon           |
| a daemon started anew  | started_anew                   | started_anew            | started_anew            |
| a fork of the worker   | child_of_a_fork                | child_of_a_fork         | -                       |
| pressure on the card   | leave_under_pressure           | kept_under_pressure     | kept_under_pressure     |
| sleep                  | leave_the_card_at_a_sleep      | nothing_is_kept_asleep  | nothing_is_kept_asleep  |
| sleep without a daemon | killed_daemon                  | killed_daemon           | killed_daemon           |
| close                  | closed_worker                  | closed_worker           | -                       |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, Final

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from tensord.client.device.cache import DeviceCache
from tensord.client.device.torch_device import TorchDevice
from tensord.client.vllm import card_outputs
from tensord.client.vllm.card_outputs import CardOutputs
from tensord.client.vllm.encoder_cache import keeping_weights
from tensord.client.vllm.settings import Settings
from tensord.errors import BadConfiguration
from tensord.shm.layout import RING_BYTES_MAX
from tensord.testing.fake_card import FakeCard

from ..client.device.card import CARD, card_folder, filled, watching
from ..client.device.standin import Accelerator
from ..daemon_process import PATIENCE_S, Daemon, until
from .conftest import MANAGER, StartEngine
from .conftest import fresh as fresh_for_an_engine
from .engine import PATIENCE_S as ENGINE_PATIENCE_S
from .step_bench import ROWS, Steps, attached, encoded, other_name, request, right
from .tiny_llava import WIDTH

_numbers = count(70_000)
pytestmark = pytest.mark.usefixtures("patient")
CARD_BYTES: Final = 1 << 20
OUTPUT_BYTES: Final = 4 * ROWS * WIDTH


class CardStand:
    """A card, the daemon that watches it, and engines with a worker on it."""

    def __init__(self, folder: Path, daemon: Daemon, card: FakeCard) -> None:
        self.folder = folder
        self.daemon = daemon
        self.card = card
        self.memory = Accelerator(CARD_BYTES)
        self.client = daemon.client()

    def device(self, device: torch.device) -> TorchDevice:
        made = TorchDevice(0, name=CARD, accelerator=self.memory)
        made.reports = False  # the daemon reads the card's file
        return made

    def engine(self, number: int = 1, *, capacity: int = ROWS, **about: Any) -> Steps:
        """An engine whose own encoder cache has room for one picture."""
        settings = {"device_bytes_max": 64 * OUTPUT_BYTES, **about}
        return attached(Steps(other_name(self.daemon.socket, number), capacity=capacity, **settings))

    def keys(self, outputs: CardOutputs) -> set[bytes]:
        held = outputs._held
        assert held is not None
        return {key for key in outputs._kept if held.contains(key)}


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[CardStand]:
    with card_folder() as folder, FakeCard(folder, CARD, CARD_BYTES) as card, watching(card) as daemon:
        daemon.start()
        daemon.until(lambda status: CARD in str(status), "the card's gauge")
        made = CardStand(folder, daemon, card)
        monkeypatch.setattr(card_outputs, "card_of", made.device)
        # A daemon that answers late on a busy machine refuses nothing.
        monkeypatch.setattr(card_outputs, "REFUSED_S", 0.0)
        monkeypatch.setattr("tensord.client.device.cache._PROMOTION_ASK_S", PATIENCE_S)
        yield made


def fresh() -> int:
    return next(_numbers)


def outputs_of(engine: Steps, rank: int = 0) -> CardOutputs:
    side = engine.workers[rank]._worker
    assert side is not None and side._card is not None
    return side._card


def held_of(engine: Steps) -> DeviceCache:
    """The worker's cache on the card, once it is open."""
    outputs = outputs_of(engine)
    until(lambda: outputs._held is not None, "the cache on the card is open")
    assert outputs._held is not None
    return outputs._held


def counted(engine: Steps, name: str) -> float:
    engine.step()
    return engine.counts.get(name, 0)


def more(engine: Steps, name: str, before: float) -> bool:
    return counted(engine, name) > before


def settled(engine: Steps) -> None:
    """Returns when the worker's thread has done what was queued so far."""
    side, done = engine.workers[0]._worker, Event()
    assert side is not None and side._background.post(lambda client: done.set())
    assert done.wait(PATIENCE_S)


def asks(engine: Steps, *pictures: int) -> None:
    """Requests for one picture after the other, whose answers have to be right."""
    for picture in pictures:
        asked = request(picture)
        assert right([asked], engine.run(asked))


def kept(engine: Steps, picture: int) -> None:
    """Has the engine encode the picture, and returns when it is on the card, and not in the engine's encoder cache."""
    held = held_of(engine)
    until(lambda: held.mode == "relaxed", "the daemon knows how full the card is")
    before = counted(engine, "device_kept")
    asks(engine, picture)
    until(partial(more, engine, "device_kept", before), "the output is kept")
    dropped(engine)


def kept_with_key(stand: CardStand, engine: Steps) -> tuple[int, bytes]:
    """A picture that the engine has on its card, and its key."""
    picture = fresh()
    kept(engine, picture)
    (key,) = stand.keys(outputs_of(engine))
    return picture, key


def dropped(engine: Steps) -> None:
    """Has the engine's encoder cache drop what it has."""
    for cached in engine.caches:
        cached.clear()
    with keeping_weights():
        engine.manager.reset()


# ---- hits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_repeated_picture_is_served_from_the_card_when_the_encoder_cache_has_dropped_it(
    stand: CardStand, dtype: torch.dtype
) -> None:
    with stand.engine(dtype=dtype) as engine:
        first, second = fresh(), fresh()
        held = held_of(engine)
        until(lambda: held.mode == "relaxed", "the daemon knows how full the card is")
        for picture in (first, second):
            before = counted(engine, "device_kept")
            asked = request(picture)
            assert right([asked], engine.run(asked), dtype)
            until(partial(more, engine, "device_kept", before), "the output is kept")
        for picture in (first, second, first):
            asked = request(picture)
            assert right([asked], engine.run(asked), dtype)
        assert len(engine.encoded) == 2
        assert counted(engine, "device_hits") == 3
        assert counted(engine, "loads") == 0


def test_an_output_of_another_engine_is_loaded_and_then_kept(stand: CardStand) -> None:
    with stand.engine(1, device_bytes_max=0) as another, stand.engine(2) as engine:
        picture, between = fresh(), fresh()
        asks(another, picture)
        until(lambda: counted(another, "saves") == 1, "the output is stored")
        asks(engine, picture)
        assert counted(engine, "loads") == 1
        until(lambda: counted(engine, "device_kept") == 1, "the output is kept")
        asks(engine, between, picture)
        assert engine.encoded == [f"picture-{between}"]
        assert counted(engine, "device_hits") == 1
        assert counted(engine, "loads") == 1


def test_an_output_on_the_card_is_not_served_for_another_content_of_the_ring(stand: CardStand) -> None:
    with stand.engine() as engine:
        picture, key = kept_with_key(stand, engine)
        other = np.full((ROWS, WIDTH), 7.0, np.float32)
        stand.client.evict(key)
        assert stand.client.put(key, other, wait=True).state == "stored"
        (found,) = engine.run(request(picture))
        assert np.array_equal(found[0].numpy(), other)
        assert counted(engine, "device_hits") == 0


def test_a_tensor_that_was_not_copied_from_the_ring_is_not_served(stand: CardStand) -> None:
    with stand.engine() as engine:
        picture, key = kept_with_key(stand, engine)
        lease = held_of(engine).get(key)
        assert lease is not None
        copied = lease.tree
        lease.release()
        held_of(engine).put(key, stand.memory.empty((ROWS, WIDTH), torch.float32))
        asks(engine, picture)
        assert counted(engine, "device_hits") == 0
        assert counted(engine, "loads") == 1
        assert copied is not None, "it was alive all the time"


def test_a_picture_that_the_ring_has_lost_is_encoded_though_it_is_on_the_card(stand: CardStand) -> None:
    with stand.engine() as engine:
        picture, key = kept_with_key(stand, engine)
        stand.client.evict(key)
        asks(engine, picture)
        assert engine.encoded == [f"picture-{picture}"] * 2


# ---- the budget, and the card's memory


def test_outputs_stay_within_their_budget_and_the_last_used_ones_stay(stand: CardStand) -> None:
    with stand.engine(device_bytes_max=2 * OUTPUT_BYTES + OUTPUT_BYTES // 2) as engine:
        first, second, third = fresh(), fresh(), fresh()
        kept(engine, first)
        kept(engine, second)
        asks(engine, first)
        dropped(engine)
        kept(engine, third)
        held = held_of(engine)
        assert held.size_bytes == 2 * OUTPUT_BYTES
        hits = counted(engine, "device_hits")
        asks(engine, first)
        assert counted(engine, "device_hits") == hits + 1
        dropped(engine)
        asks(engine, second)
        assert counted(engine, "device_hits") == hits + 1


def test_an_output_over_the_budget_is_not_kept(stand: CardStand) -> None:
    with stand.engine(device_bytes_max=OUTPUT_BYTES // 2) as engine:
        picture = fresh()
        asks(engine, picture)
        until(lambda: counted(engine, "saves") == 1, "the output is stored")
        dropped(engine)
        asks(engine, picture)
        settled(engine)
        assert counted(engine, "device_kept") == 0
        assert counted(engine, "loads") == 1


def test_outputs_leave_under_pressure_and_are_loaded_from_the_ring(stand: CardStand) -> None:
    with stand.engine() as engine:
        picture = fresh()
        kept(engine, picture)
        filled(stand.card, 0.97)
        held = held_of(engine)
        until(lambda: not len(held), "the daemon takes the memory back")
        asks(engine, picture)
        assert len(engine.encoded) == 1
        assert counted(engine, "loads") == 1


def test_nothing_is_kept_under_pressure(stand: CardStand) -> None:
    with stand.engine() as engine:
        held = held_of(engine)
        filled(stand.card, 0.97)
        until(lambda: held.mode == "emergency", "the mode")
        picture = fresh()
        asks(engine, picture)
        until(lambda: counted(engine, "saves") == 1, "the output is stored")
        dropped(engine)
        asks(engine, picture)
        settled(engine)
        assert counted(engine, "loads") == 1
        assert counted(engine, "device_kept") == 0
        assert not len(held)


def test_an_output_that_the_encoder_cache_has_leaves_the_card_after_it_was_dropped_there(stand: CardStand) -> None:
    with stand.engine() as engine:
        picture = fresh()
        kept(engine, picture)
        asks(engine, picture)
        assert counted(engine, "device_hits") == 1
        held = held_of(engine)
        filled(stand.card, 0.97)
        until(lambda: held.tally.kept, "the daemon orders it to leave")
        assert len(held) == 1
        expected = encoded(request(picture).mm_features[0].data)
        assert torch.equal(engine.caches[0][f"picture-{picture}"], expected)
        dropped(engine)
        until(lambda: not len(held), "it leaves")


def test_a_card_without_room_leaves_loads_to_the_ring(stand: CardStand) -> None:
    with stand.engine() as engine:
        stand.memory.total_bytes = 0
        picture = fresh()
        asks(engine, picture)
        until(lambda: counted(engine, "saves") == 1, "the output is stored")
        until(lambda: outputs_of(engine)._not_before, "the card is full")
        dropped(engine)
        asks(engine, picture)
        assert counted(engine, "loads") == 1
        assert len(engine.encoded) == 1


# ---- the daemon


def test_a_killed_daemon_leaves_answers_right(stand: CardStand) -> None:
    with stand.engine() as engine:
        first, second = fresh(), fresh()
        kept(engine, first)
        stand.daemon.kill()
        asks(engine, first, second, first, second)
        held = held_of(engine)
        assert len(held) == 1, "an output was lost with the daemon"
        settled(engine)
        assert counted(engine, "device_hits") == 2
        assert counted(engine, "device_kept") == 1
        dropped(engine)
        CPUWorker.sleep(object())  # type: ignore[arg-type, unused-ignore]
        assert not len(held), "an output stayed on the card at a sleep without a daemon"
        asks(engine, first, second)


def test_a_daemon_started_anew_finds_the_outputs_on_the_card(stand: CardStand) -> None:
    with stand.engine() as engine:
        picture, between = fresh(), fresh()
        kept(engine, picture)
        stand.daemon.kill()
        stand.daemon.start()
        held = held_of(engine)
        until(lambda: held.mode is not None, "the card's mode")
        attached(engine)
        asks(engine, between)
        dropped(engine)
        hits = counted(engine, "device_hits")
        asks(engine, picture)
        assert counted(engine, "device_hits") == hits + 1
        dropped(engine)
        filled(stand.card, 0.97)
        until(lambda: not len(held), "the new daemon takes the memory back")


# ---- sleep, forks, the end


def test_outputs_leave_the_card_at_a_sleep_and_those_that_the_ring_has_lost_go_there(stand: CardStand) -> None:
    with stand.engine() as engine:
        first, second = fresh(), fresh()
        kept(engine, first)
        kept(engine, second)
        keys = stand.keys(outputs_of(engine))
        lost = next(iter(keys))
        stand.client.evict(lost)
        CPUWorker.sleep(object())  # type: ignore[arg-type, unused-ignore]
        held = held_of(engine)
        assert not len(held)
        assert all(stand.client.contains(key) for key in keys)
        assert not stand.memory._taken_bytes(), "memory stayed with this process"
        asks(engine, first, second)
        assert len(engine.encoded) == 2


def test_nothing_is_kept_asleep_and_outputs_are_kept_again_after_it(stand: CardStand) -> None:
    with stand.engine() as engine:
        CPUWorker.sleep(object())  # type: ignore[arg-type, unused-ignore]
        asks(engine, fresh())
        until(lambda: counted(engine, "saves") == 1, "the output is stored")
        settled(engine)
        assert counted(engine, "device_kept") == 0
        CPUWorker.wake_up(object())  # type: ignore[arg-type, unused-ignore]
        kept(engine, fresh())


def test_the_child_of_a_fork_uses_nothing_of_its_parents_card(stand: CardStand) -> None:
    with stand.engine() as engine:
        kept(engine, fresh())
        outputs = outputs_of(engine)
        ((key, (checksum, _)),) = outputs._kept.items()
        child = os.fork()
        if not child:
            try:
                os._exit(outputs.lent(key, checksum, (ROWS, WIDTH), torch.float32) is not None)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert outputs.lent(key, checksum, (ROWS, WIDTH), torch.float32) is not None


def test_a_closed_worker_holds_nothing_on_the_card(stand: CardStand) -> None:
    engine = stand.engine()
    kept(engine, fresh())
    outputs = outputs_of(engine)
    engine.close()
    assert outputs._held is not None and outputs._held.closed and not len(outputs._held)
    outputs.keep(bytes(32), stand.client)
    outputs.leave()
    assert not stand.memory._taken_bytes() or stand.memory.pools, "memory stayed in use"


def test_an_output_cache_that_was_closed_leaves_loads_to_the_ring(stand: CardStand) -> None:
    with stand.engine() as engine:
        picture = fresh()
        kept(engine, picture)
        held = held_of(engine)
        held.close()
        asks(engine, picture)
        assert counted(engine, "loads") == 1
        asks(engine, fresh())


# ---- who keeps nothing


def test_a_card_that_another_worker_of_the_client_uses_is_left_to_it(
    stand: CardStand, caplog: pytest.LogCaptureFixture
) -> None:
    with stand.engine(ranks=2) as engine:
        picture = fresh()
        asks(engine, picture)
        until(lambda: counted(engine, "saves") == 1, "the output is stored")
        dropped(engine)
        asks(engine, picture)
        until(lambda: counted(engine, "device_kept") == 1, "one of them keeps the output")
        dropped(engine)
        hits, loads = counted(engine, "device_hits"), counted(engine, "loads")
        asks(engine, picture)
        assert len(engine.encoded) == 1
        assert (counted(engine, "device_hits"), counted(engine, "loads")) == (hits + 1, loads + 1)
    assert "tensord.device_bytes_max has no effect: device 'card0' has a DeviceCache" in caplog.text


def test_a_worker_without_a_gpu_says_that_it_keeps_nothing(
    stand: CardStand, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with stand.engine() as engine:
        picture = fresh()
        asks(engine, picture)
        side = engine.workers[0]._worker
        assert side is not None and side._card is None
    assert "tensord.device_bytes_max has no effect: torch" in caplog.text


def test_a_mere_producer_keeps_nothing(stand: CardStand, caplog: pytest.LogCaptureFixture) -> None:
    with stand.engine(role="ec_producer") as engine:
        side = engine.workers[0]._worker
        assert side is not None and side._card is None
    assert "tensord.device_bytes_max has no effect: an engine with the role ec_producer loads nothing" in caplog.text


@pytest.mark.parametrize("value", [-1, 1.5, True, "1GiB", None, RING_BYTES_MAX + 1])
def test_a_budget_that_is_no_number_of_bytes_is_refused_when_the_engine_starts(value: object) -> None:
    assert Settings.read({}).device_bytes_max == 0
    assert Settings.read({"tensord.device_bytes_max": 1 << 30}).device_bytes_max == 1 << 30
    with pytest.raises(BadConfiguration, match=r"tensord\.device_bytes_max=.* must be a number of bytes from 0 to \d+"):
        Settings.read({"tensord.device_bytes_max": value})


# ---- an engine


def test_an_engine_answers_the_same_from_its_card_after_a_reset_and_after_a_sleep(
    stand: CardStand, model: Path, start_engine: StartEngine
) -> None:
    settings = {"tensord.socket": str(stand.daemon.socket), "tensord.canary": 0, "tensord.device_bytes_max": 1 << 20}
    with start_engine(
        model,
        socket=stand.daemon.socket,
        connector={"ec_connector_extra_config": settings},
        environ={"ENGINE_OUTPUTS": f"{CARD} {CARD_BYTES}"},
        ec_manager_config=MANAGER,
    ) as engine:
        picture = fresh_for_an_engine()
        before = engine.generate(picture, salt="0")
        number = count(1)

        def metric(name: str) -> float:
            return float(engine.ask("metrics").get(f"vllm:ec_tensord_{name}", 0))

        def answered_anew() -> None:
            """The picture is asked for when vLLM has neither its output nor its KV any more."""
            engine.ask("engine", method="reset_encoder_cache")
            assert engine.generate(picture, salt=str(next(number))) == before

        def is_kept(times: int) -> bool:
            answered_anew()
            return metric("device_kept") >= times

        until(lambda: is_kept(1), "the output is kept", ENGINE_PATIENCE_S)
        hits = metric("device_hits")
        answered_anew()
        assert metric("device_hits") == hits + 1
        engine.ask("engine", method="sleep")
        engine.ask("engine", method="wake_up")
        assert "its encoder outputs have left the card" in engine.log
        until(lambda: is_kept(2), "the output is kept again", ENGINE_PATIENCE_S)
        stand.daemon.kill()
        answered_anew()
        assert engine.encoded() == 1
