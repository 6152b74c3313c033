"""Lane words that a signal handler's exception has lost come back, and no word that anybody has.

The exception is raised at each instruction at which the interpreter looks for signals, in turn.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensord.client.reading import sweep
from tensord.client.reading.lease import Recipes
from tensord.client.reading.view import View
from tensord.client.threads import forks
from tensord.shm.lanes.lane import LOG_AT, SPARE_END, Lane

from ... import interruptions
from ...memory_bench import MemoryBench, key

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
POINTS_MAX = 400


def interrupt(number: int, act: Callable[[], object]) -> bool:
    """`act()` with an exception at its `number`-th point; False if it has fewer."""
    return bool(interruptions.interrupt(number, act, ("client/reading/view.py", "shm/lanes/lane.py")))


def kept(view: View) -> Lane:
    forks.keep(view.lane)
    return view.lane


def swept(lane: Lane) -> None:
    """Twice: a word is taken back that was found before."""
    for _ in range(2):
        sweep.sweep()


WAYS: dict[str, Callable[[View], object]] = {
    "get": lambda view: view.get(key(1)),
    "a miss": lambda view: view.get(key(99)),
    "slowly": lambda view: view.verified(key(1)),
    "hold": lambda view: view.hold(key(1)),
    "many": lambda view: view.get_many(np.frombuffer(key(1) + key(99) + key(2), np.uint8).reshape(3, 32)),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_at_any_point_uses_up_no_word_for_ever_and_pins_nothing_for_ever(
    bench: MemoryBench, way: str
) -> None:
    for number in (1, 2):
        bench.put(key(number), np.arange(100) + number)
    view = bench.view()
    lane = kept(view)
    lost = 0
    for number in range(POINTS_MAX):
        if not interrupt(number, lambda: WAYS[way](view)):
            break
        lost += bool(lane.in_use)
        swept(lane)
        assert lane.in_use == 0, f"point {number}"
        assert sorted(lane.free) == list(range(SPARE_END, LOG_AT)), f"point {number}: a word was doubled"
        assert not bench.pins(), f"point {number}: a pin stays"
    else:
        pytest.fail("it never came to its end")
    assert lost or way == "a miss", "no word was lost in the first place"


def test_a_sweep_takes_no_word_that_is_viewed_batched_or_in_a_threads_hands(
    bench: MemoryBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 6):
        bench.put(key(number), {"a": np.arange(100) + number})
    view = bench.view()
    lane = kept(view)
    lease = view.get(key(1))
    batch = view.get_many(np.frombuffer(key(2) + key(3), np.uint8).reshape(2, 32))
    entered, go_on = threading.Event(), threading.Event()
    got: list[Any] = []
    learned = Recipes.__missing__

    def slowly(self: Recipes, header: bytes) -> Any:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            go_on.wait()
        return learned(self, header)

    monkeypatch.setattr(Recipes, "__missing__", slowly)
    view._recipes.clear()
    thread = threading.Thread(target=lambda: got.append(view.get(key(4))))
    thread.start()
    entered.wait()
    lost = lane.pin(77)
    try:
        assert [sweep.sweep() for _ in range(5)] == [0] * 5, "a thread has a word in its hands"
        assert lane.in_use == 5 and len(bench.pins()) == 5
    finally:
        go_on.set()
        thread.join()
    swept(lane)
    assert lost in lane.free and lane.words[lost] == 0
    assert lane.in_use == 4 and len(bench.pins()) == 4
    assert lease is not None and batch[0] is not None and got[0] is not None
    del lease, batch
    got.clear()
    gc.collect()
    assert lane.in_use == 0 and not bench.pins()
