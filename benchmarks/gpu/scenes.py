"""Scenes of the device cache on a card. gpu_check.py runs each in a process of its own, since some need settings that
torch reads at its start.

    python benchmarks/gpu/scenes.py SCENE [--device 0] [--entry-bytes N] [--standin FOLDER]

A scene prints one JSON line for each check, {"check", "held", "seen"}, and for each figure, {"figure", "bytes_per_s"}.
`held` is null where this machine cannot decide a check. With --standin it plays on stand-in cards, as the tests do.

Owns: the scenes. Does not own: the cards (bench.py), the report (gpu_check.py). Each scene starts its own daemon.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.tensord_peer import serving
from peers.worker import key_of

import tensord
from gpu.bench import Bench, bench_of
from gpu.card import PATIENCE_S, NoCard, until

MIB: Final = 1 << 20
SMALL_SHM_BYTES: Final = 64 * MIB


@dataclass
class Stage:
    """What a scene plays with. `index`: the card; `size_bytes`: of an entry."""

    bench: Bench
    index: int
    size_bytes: int
    standin: str | None

    def check(self, name: str, held: bool | None, seen: str) -> None:
        print(json.dumps({"check": name, "held": held, "seen": seen}), flush=True)

    def figure(self, name: str, bytes_per_s: float) -> None:
        print(json.dumps({"figure": name, "bytes_per_s": bytes_per_s}), flush=True)

    def key(self, number: int) -> bytes:
        return key_of("gpu_scenes", self.size_bytes, number)

    @contextmanager
    def cache(self, *flags: str, index: int | None = None, gives_back: bool = True) -> Iterator[tensord.DeviceCache]:
        """A cache of the card, with a daemon that has these flags."""
        ring_bytes = -(-max(8 * self.size_bytes, 32 * MIB) // MIB) * MIB
        with (
            serving(ring_bytes, *self.bench.flags, *flags) as daemon,
            tensord.Client(daemon.socket, name="gpu_scenes", timeout_s=PATIENCE_S) as client,
            tensord.DeviceCache(
                client, self.bench.device(self.index if index is None else index, gives_back=gives_back)
            ) as cache,
        ):
            yield cache


def _round_trip(stage: Stage, cache: tensord.DeviceCache, number: int, index: int) -> str:
    """An entry goes to the ring and comes back. Returns what was wrong with it, or nothing."""
    bench, key = stage.bench, stage.key(number)
    tree = bench.tree(index, stage.size_bytes, number)
    bits = bench.bits(tree)
    state = cache.put(key, tree, wait=True).state
    if state != "registered":
        return f"the put is {state}"
    del tree
    if cache.offload(key, wait=True) != 1:
        return f"it was not offloaded; {cache.error or 'no error'}"
    with until(lambda: cache.get(key), "the entry") as lease:
        if lease.tier != "host" or bench.bits(lease.tree) != bits:
            return f"its copy on tier {lease.tier} is not the same"
    with until(lambda: cache.get(key, promote=True), "the entry") as lease:
        if lease.tier != "device" or bench.bits(lease.tree) != bits:
            return f"what came back to tier {lease.tier} is not the same"
    return ""


# ---- scenes


def round_trip(stage: Stage) -> None:
    """Entries go to the ring and come back, and their memory is given back. Also with the settings of
    torch's allocator that gpu_check.py gives this process."""
    how = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") or "torch's defaults"
    with stage.cache() as cache:
        wrong = [found for number in range(4) if (found := _round_trip(stage, cache, number, stage.index))]
        stage.check(f"a round trip is bit-identical ({how})", not wrong, wrong[0] if wrong else "4 entries")
        held_bytes = stage.bench.used_bytes(stage.index)[0]
        offloaded = cache.offload(*(stage.key(number) for number in range(4)), wait=True)
        gc.collect()
        until(lambda: cache.device.give_back() == 0, "all that can be given back")
        freed_bytes = held_bytes - stage.bench.used_bytes(stage.index)[0]
        keeps_segments = "cudaMallocAsync" not in how
        stage.check(
            f"promoted entries' memory goes back to the driver ({how})",
            freed_bytes >= 3 * stage.size_bytes if keeps_segments and offloaded == 4 else None,
            f"{offloaded} offloaded, {freed_bytes // MIB} MiB by the driver",
        )


def engines_memory(stage: Stage) -> None:
    """Memory that torch keeps for the engine stays with it, if it says so."""
    with stage.cache(gives_back=False) as cache:
        activations = stage.bench.tree(stage.index, 8 * stage.size_bytes, 99)
        del activations
        gc.collect()
        before_bytes = stage.bench.used_bytes(stage.index)[0]
        wrong = _round_trip(stage, cache, 0, stage.index)
        cache.offload(stage.key(0), wait=True)
        lost_bytes = before_bytes - stage.bench.used_bytes(stage.index)[0]
        stage.check(
            "the engine's cached memory stays with torch",
            None if stage.standin is not None else not wrong and lost_bytes < 4 * stage.size_bytes,
            wrong or f"{lost_bytes // MIB} of {8 * stage.size_bytes // MIB} MiB went to the driver",
        )


def visible_devices(stage: Stage) -> None:
    """With CUDA_VISIBLE_DEVICES set to another card, torch's card 0 is that card, and so is the gauge."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with stage.cache() as cache:
        wrong = _round_trip(stage, cache, 0, 0)
        name = cache.device.name
        gauges = [row["gauge"] for row in cache.client.status()["governor"]["gauges"]]
        stage.check(
            f"torch's card 0 has the gauge of its own PCI address (CUDA_VISIBLE_DEVICES={shown})",
            not wrong and name in gauges,
            wrong or f"{name}, of the gauges {gauges}",
        )


def second_card(stage: Stage) -> None:
    """A cache of card 1, with card 0 as the current one, leaves card 0 alone."""
    if stage.bench.cards < 2:
        for name in ("a round trip on a second card", "no context on the other card"):
            stage.check(name, None, "this machine shows one card")
        return
    with stage.cache(index=1) as cache:
        done: list[str] = []
        thread = threading.Thread(target=lambda: done.append(_round_trip(stage, cache, 0, 1)))
        thread.start()
        thread.join(2 * PATIENCE_S)
        stage.check("a round trip on a second card", done == [""], done[0] if done else "it did not end")
    has = stage.bench.has_context(0)
    stage.check("no context on the other card", None if has is None else not has, f"context on card 0: {has}")


def graph_capture(stage: Stage) -> None:
    """Graphs are captured while orders come and entries are promoted."""
    with stage.cache() as cache:
        bench = stage.bench
        tree = bench.tree(stage.index, stage.size_bytes, 1)
        bits = bench.bits(tree)
        cache.put(stage.key(1), tree, wait=True)
        del tree
        promoted: list[str] = []

        def meanwhile() -> None:
            cache.offload(stage.key(1))
            lease = cache.get(stage.key(1), promote=True)
            promoted.append("none" if lease is None else lease.tier)

        right = [bench.capture(stage.index, meanwhile) for _ in range(10)]
        stage.check("graphs are captured and replayed while orders come", all(right), f"{sum(right)} of {len(right)}")
        until(lambda: not cache.contains(stage.key(1)), "the order to be carried out")
        with until(lambda: cache.get(stage.key(1)), "the entry") as lease:
            stage.check(
                "the order is carried out after the captures",
                bench.bits(lease.tree) == bits,
                f"hits on {set(promoted)}",
            )


def fork(stage: Stage) -> None:
    """A process forks after it has used the card."""
    with stage.cache() as cache:
        first = _round_trip(stage, cache, 0, stage.index)
        child = os.fork()
        if child == 0:
            try:
                good = cache.closed and len(cache) == 0 and cache.put(stage.key(1), 0).state == "lost"
                os._exit(0 if good else 1)
            finally:
                os._exit(2)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        after = _round_trip(stage, cache, 1, stage.index)
        stage.check("the child of a fork has an empty, closed cache", status == 0, f"exit status {status}")
        stage.check("its parent goes on", not first and not after, first or after or "a round trip before and after")


def owner(stage: Stage) -> None:
    """A part of two_owners: registers two entries, says so, and stays."""
    socket, number = os.environ["GPU_SCENES_SOCKET"], int(os.environ["GPU_SCENES_OWNER"])
    with tensord.Client(socket, timeout_s=PATIENCE_S) as client:
        cache = tensord.DeviceCache(client, stage.bench.device(stage.index))
        for each in (number, number + 1):
            cache.put(stage.key(each), stage.bench.tree(stage.index, stage.size_bytes, each), wait=True)
        print("ready", flush=True)
        sys.stdin.read()


def two_owners(stage: Stage) -> None:
    """Two processes hold entries on one card, and one is killed."""
    with stage.cache() as cache:
        client = cache.client
        command = [
            sys.executable,
            __file__,
            "owner",
            "--device",
            str(stage.index),
            "--entry-bytes",
            str(stage.size_bytes),
        ]
        if stage.standin is not None:
            command += ["--standin", stage.standin]
        owners = []
        for number in (10, 20):
            more = {"GPU_SCENES_SOCKET": str(client.link.path), "GPU_SCENES_OWNER": str(number)}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            owners.append(subprocess.Popen(command, env=os.environ | more, **pipes))
        try:
            said = [each.stdout.readline().strip() for each in owners]  # type: ignore[union-attr]

            def entries() -> int:
                return sum(row["entries"] for row in client.status()["governor"]["devices"])

            until(lambda: entries() == 4, "the entries of both owners") if said == ["ready"] * 2 else None
            stage.check("two processes have entries on one card", entries() == 4, f"{entries()} entries; {said}")
            used_bytes = stage.bench.used_bytes(stage.index)[0]
            owners[0].send_signal(signal.SIGKILL)
            owners[0].wait()
            until(lambda: entries() == 2, "the entries of the killed owner to go")
            freed_bytes = used_bytes - stage.bench.used_bytes(stage.index)[0]
            stage.check(
                "a killed owner's entries go, the other's stay", entries() == 2, f"{freed_bytes // MIB} MiB freed"
            )
        finally:
            for each in owners:
                each.kill()
                each.wait()


def emergency(stage: Stage) -> None:
    """The card fills up: registrations are refused, idle entries leave, and it ends. The thresholds are put a little
    above what is used now, so the card does not have to be full."""
    used_bytes, total_bytes = stage.bench.used_bytes(stage.index)
    step = max(16 * stage.size_bytes, total_bytes // 50) / total_bytes
    at = used_bytes / total_bytes + step
    if at + 2 * step > 1.0:
        stage.check("an emergency refuses registrations", None, f"{used_bytes} of {total_bytes} bytes are used already")
        return
    flags = [
        *("--pressure-normal", f"{at - 0.4 * step:.6f}", "--pressure-pressure", f"{at - 0.3 * step:.6f}"),
        *("--pressure-critical", f"{at - 0.2 * step:.6f}", "--pressure-emergency", f"{at:.6f}"),
        *("--pressure-hysteresis", f"{min(0.02, 0.05 * step):.6f}", "--pressure-critical-idle-s", "50ms"),
        *("--gauges-sample-s", "50ms", "--gauges-sample-pressed-s", "50ms"),
    ]
    with stage.cache(*flags) as cache:
        bench = stage.bench
        tree = bench.tree(stage.index, stage.size_bytes, 1)
        bits = bench.bits(tree)
        first = cache.put(stage.key(1), tree, wait=True).state
        del tree
        fill = bench.tree(stage.index, int(1.5 * step * total_bytes), 2)
        until(lambda: cache.mode == "emergency", "the emergency")
        refused = cache.put(stage.key(2), bench.tree(stage.index, stage.size_bytes, 3), wait=True).state
        stage.check("an emergency refuses registrations", refused == "refused", f"{first} before, {refused} in it")
        until(lambda: not cache.contains(stage.key(1)), "the idle entry to leave")
        with until(lambda: cache.get(stage.key(1)), "the entry") as lease:
            stage.check("idle entries leave for the ring", bench.bits(lease.tree) == bits, f"tier {lease.tier}")
        del fill
        gc.collect()
        until(lambda: cache.device.give_back() >= 0 and cache.mode != "emergency", "the emergency to end")
        again = cache.put(stage.key(4), bench.tree(stage.index, stage.size_bytes, 4), wait=True).state
        stage.check("it ends when the memory is back", again == "registered", again)


def late_streams(stage: Stage) -> None:
    """Work on streams is late: an offload waits for it."""
    bench = stage.bench
    with stage.cache() as cache:
        started = time.monotonic()
        with bench.late(stage.index):
            tree = bench.tree(stage.index, stage.size_bytes, 5)
            cache.put(stage.key(5), tree)
            put_s = time.monotonic() - started
        gone = cache.offload(stage.key(5), wait=True)
        bits = bench.bits(tree)
        del tree
        until(lambda: not cache.contains(stage.key(5)) or cache.offload(stage.key(5), wait=True), "the offload")
        with until(lambda: cache.get(stage.key(5)), "the entry") as lease:
            same = bench.bits(lease.tree) == bits
        stage.check(
            "an offload waits for late work of another stream", same, f"{gone} at once; the put took {put_s:.3f} s"
        )


def in_place_and_inbox(stage: Stage) -> None:
    """Offloads are written in place, and through the inbox."""
    for way, flag in (("in place", "owner"), ("through the inbox", "off")):
        with stage.cache("--write-in-place", flag) as cache:
            bench, rates = stage.bench, []
            wrong = _round_trip(stage, cache, 100, stage.index)
            for number in range(4):
                cache.put(stage.key(number), bench.tree(stage.index, stage.size_bytes, number), wait=True)
                started = time.perf_counter()
                if cache.offload(stage.key(number), wait=True) == 1:
                    rates.append(stage.size_bytes / (time.perf_counter() - started))
            stage.check(
                f"offloads {way} are bit-identical", not wrong and len(rates) == 4, wrong or f"{len(rates)} more"
            )
            if rates:
                stage.figure(f"card → ring, offloads {way}", max(rates))


def small_shm(stage: Stage) -> None:
    """/dev/shm of 64 MiB, as Docker gives a container without --shm-size: a larger ring is refused with the reason, a
    smaller one works."""
    free = os.statvfs("/dev/shm")
    size_bytes = free.f_blocks * free.f_frsize
    if size_bytes > SMALL_SHM_BYTES:
        seen = f"/dev/shm has {size_bytes // MIB} MiB; run it in a container without --shm-size, or as root"
        for name in (
            "a ring larger than /dev/shm is refused with the reason",
            "a ring within 64 MiB of /dev/shm works",
        ):
            stage.check(name, None, seen)
        return
    command = [sys.executable, "-m", "tensord.daemon", "--config", os.devnull, "--instance", f"shm-{os.getpid()}"]
    command += ["--socket", f"/tmp/tensord-shm-{os.getpid()}.sock", "--ring-bytes", "1GiB"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    said = (refused.stderr.strip().splitlines() or ["nothing"])[-1]
    stage.check(
        "a ring larger than /dev/shm is refused with the reason", refused.returncode != 0 and "/dev/shm" in said, said
    )
    smaller = Stage(stage.bench, stage.index, min(stage.size_bytes, 2 * MIB), stage.standin)
    with smaller.cache() as cache:
        wrong = _round_trip(smaller, cache, 0, stage.index)
    stage.check("a ring within 64 MiB of /dev/shm works", not wrong, wrong or "a round trip")


SCENES: Final[dict[str, Callable[[Stage], None]]] = {
    scene.__name__: scene
    for scene in (
        *(round_trip, engines_memory, visible_devices, second_card, graph_capture, fork),
        *(two_owners, emergency, late_streams, in_place_and_inbox, small_shm),
    )
}


def main(words: Sequence[str] | None = None) -> int:
    """0: the scene was played to its end; 2: there is no card."""
    parser = argparse.ArgumentParser(description="Plays one scene of gpu_check.py.")
    parser.add_argument("scene", choices=[*SCENES, "owner"])
    parser.add_argument("--device", type=int, default=0, metavar="INDEX", help="which card, as torch counts")
    parser.add_argument("--entry-bytes", type=int, default=16 * MIB, metavar="BYTES", help="the size of an entry")
    parser.add_argument("--standin", metavar="FOLDER", help="stand-in cards in this folder, instead of real ones")
    asked = parser.parse_args(words)
    try:
        stage = Stage(bench_of(asked.standin), asked.device, asked.entry_bytes, asked.standin)
        (owner if asked.scene == "owner" else SCENES[asked.scene])(stage)
    except NoCard as missing:
        print(f"nothing was checked: {missing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
