"""An idle engine sleeps while its card is full, and wakes up for its next request.

The card is a fake one: vLLM's CPU worker, which cannot sleep, holds bytes of it, gives them back when it is told to
sleep, and takes them again when it wakes up (engine_worker). All else is vLLM's and tensord's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tensord.client.vllm.engine import sleeping
from tensord.client.vllm.engine.settings import Settings
from tensord.testing.fake_card import FakeCard

from ..client.device.card import CARD, card_folder, watching
from ..daemon_process import Daemon, until
from .conftest import StartEngine, fresh
from .engine import PATIENCE_S, Answer, Engine

TOTAL_BYTES: Final = 100 << 20
ENGINE_BYTES: Final = 60 << 20
# With the engine's bytes, a card in mode pressure; without, a relaxed one.
OTHERS_BYTES: Final = 30 << 20
SLEPT: Final = "it sleeps; freed"
WOKE: Final = "this engine woke up"
WAITS: Final = "waits for memory to wake up"
SLEEPS: Final[dict[str, Any]] = {"tensord.sleep_at": "pressure", "tensord.sleep_idle_s": 0.2}


class CardStand:
    """A card, a daemon that watches it, and an engine on it that sleeps from mode pressure on."""

    def __init__(self, card: FakeCard, daemon: Daemon, model: Path, start_engine: StartEngine) -> None:
        self.card = card
        self.daemon = daemon
        self._model = model
        self._start_engine = start_engine
        self.engine = self.start(ENGINE_BYTES, SLEEPS)
        self.engine.wait_up()

    def start(self, size_bytes: int, settings: dict[str, Any], **options: Any) -> Engine:
        """Starts another engine, which takes so many bytes of the card when it loads its model."""
        return self._start_engine(
            self._model,
            socket=self.daemon.socket,
            settings=settings,
            separate=True,
            environ={"ENGINE_CARD": f"{self.card.folder} {self.card.name} {size_bytes}"},
            enable_sleep_mode=True,
            **options,
        )

    def used(self) -> int:
        return self.card.reading()[0]

    def asleep(self) -> None:
        """Fills the card, and returns when the engine has given its bytes back."""
        self.card.occupy(OTHERS_BYTES)
        until(lambda: self.used() == OTHERS_BYTES, "the engine sleeps", PATIENCE_S)

    def answers(self, *names: str) -> dict[str, Answer]:
        """Steps the engine until it has answered these requests. The answers are in their order."""
        answers: dict[str, Answer] = {}
        while not answers.keys() >= set(names):
            answers.update(self.engine.step())
        return answers

    def woken(self) -> int:
        """How often the engine woke up by itself. On a full card it falls asleep again soon after its answer."""
        return self.engine.log.count(WOKE)

    def mode(self, status: dict[str, Any]) -> str:
        """The card's mode as the daemon's status has it."""
        return next((str(row["mode"]) for row in status["governor"]["gauges"] if row["gauge"] == CARD), "")

    def filled(self) -> None:
        """Fills the card beside a sleeping engine, and returns when the daemon has read its gauge."""
        self.card.occupy(2 * OTHERS_BYTES)
        self.daemon.until(
            lambda status: any(row["used_bytes"] == 2 * OTHERS_BYTES for row in status["governor"]["gauges"]),
            "a full card's reading",
        )

    def ready(self) -> None:
        """Whatever a test did: the daemon runs, the card has room, and the engine is awake and attached."""
        if self.daemon.running:
            self.daemon.resume()
        else:
            self.daemon.start()
        self.card.occupy(0)
        # A process that was killed a moment ago may still have its bytes.
        until(lambda: self.card.refresh()[0] in (0, ENGINE_BYTES), "only the engine is on the card")
        # Otherwise the engine wakes up, and falls asleep again by the last test's reading.
        self.daemon.until(lambda status: self.mode(status) in ("relaxed", "normal"), "a free card")
        self.engine.generate()
        until(lambda: any(not row["orphaned"] for row in self.daemon.client_rows()), "the engine is attached")


@pytest.fixture(scope="module")
def module_stand(model: Path, start_engine: StartEngine) -> Iterator[CardStand]:
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card, watching(card) as daemon:
        daemon.start()
        yield CardStand(card, daemon, model, start_engine)


@pytest.fixture
def stand(module_stand: CardStand) -> CardStand:
    module_stand.ready()
    return module_stand


def test_an_idle_engine_sleeps_while_its_card_is_full_and_answers_its_next_request_as_before(stand: CardStand) -> None:
    picture = fresh()
    before = stand.engine.generate(picture)
    stand.asleep()
    encoded, woken = stand.engine.encoded(), stand.woken()
    assert stand.engine.generate(picture) == before
    assert stand.woken() > woken, "it answered without its memory"
    assert stand.engine.encoded() == encoded, "the picture was encoded again"


def test_requests_wait_for_room_on_the_card_and_are_answered_in_their_order(stand: CardStand) -> None:
    pictures = [fresh() for _ in range(3)]
    before = [stand.engine.generate(picture) for picture in pictures]
    stand.asleep()
    stand.filled()
    waited = stand.engine.log.count(WAITS)
    names = [stand.engine.add(picture) for picture in pictures]
    until(lambda: stand.engine.log.count(WAITS) > waited, "the engine says that it waits", PATIENCE_S)
    assert stand.used() == 2 * OTHERS_BYTES, "it woke up into a full card"
    stand.card.occupy(OTHERS_BYTES)
    answers = stand.answers(*names)
    assert [answers[name] for name in names] == before
    assert list(answers) == names


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_sleeping_engine_without_a_daemon_wakes_up_for_its_next_request(stand: CardStand, how: str) -> None:
    picture = fresh()
    before = stand.engine.generate(picture)
    stand.asleep()
    woken = stand.woken()
    stand.daemon.kill() if how == "killed" else stand.daemon.pause()
    assert stand.engine.generate(picture) == before
    assert stand.woken() > woken
    stand.daemon.start() if how == "killed" else stand.daemon.resume()
    stand.asleep()


def test_a_call_that_needs_the_model_is_carried_out_by_a_woken_engine_and_the_question_whether_it_sleeps_is_none(
    stand: CardStand,
) -> None:
    stand.asleep()
    assert stand.engine.ask("engine", method="is_sleeping")
    assert stand.used() == OTHERS_BYTES
    woken = stand.woken()
    stand.engine.ask("engine", method="reset_encoder_cache")
    assert stand.woken() > woken, "the call reached a sleeping engine"


def test_somebody_elses_sleep_is_ended_by_nobody_else(stand: CardStand) -> None:
    picture = fresh()
    before = stand.engine.generate(picture)
    stand.asleep()
    stand.engine.ask("engine", method="sleep")
    stand.card.occupy(0)
    name = stand.engine.add(picture)
    # Answered by the core after the request.
    assert stand.engine.ask("engine", method="is_sleeping")
    assert stand.used() == 0, "a request ended a sleep that somebody asked for"
    stand.engine.ask("engine", method="wake_up")
    assert stand.answers(name)[name] == before


def test_an_engine_sleeps_where_only_its_kv_connector_asks_for_it(stand: CardStand) -> None:
    kv = {
        "kv_connector": "TensordKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tensord.socket": str(stand.daemon.socket), **SLEEPS},
    }
    with stand.start(0, {}, kv_transfer_config=kv) as both:
        both.wait_up()
        both.generate()
        stand.asleep()
        stand.card.occupy(OTHERS_BYTES + ENGINE_BYTES)
        until(lambda: SLEPT in both.log, "the engine sleeps", PATIENCE_S)


def test_an_engine_that_cannot_sleep_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(card: str, *, sleep_mode: bool = True, engines: int = 1) -> str:
        caplog.clear()
        monkeypatch.setattr(sleeping, "_asked", [Settings(sleep_at="pressure")])
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=engines),
            model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
        )
        executor = SimpleNamespace(collective_rpc=lambda method: [(card, 0)])
        assert sleeping.begun(SimpleNamespace(vllm_config=config, model_executor=executor)) is None
        return caplog.text

    assert "its workers use no GPU" in said("")
    assert "all engines have to sleep together" in said(CARD, engines=2)
    assert "start the engine with enable_sleep_mode" in said(CARD, sleep_mode=False)
    monkeypatch.setattr(sleeping, "envs", SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=False))
    sleeping.install(Settings(sleep_at="pressure"))
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in caplog.text
