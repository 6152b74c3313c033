"""Three hosts run an engine of vLLM each. One of them computes a long system prompt; the others read its keys and
values from the store behind all three.

    python examples/cluster_engines.py

Needs vLLM. The hosts are those of `cluster.py`: a daemon with a ring and a network address each, around one
redis-server. The model is the tiny Llama of `tiny_decoder.py` (random weights, no downloads). The hosts are asked one
after the other, each its own question after the same system prompt. Each is asked three times:

    first   as it comes
    again   after the engine's own prefix cache was emptied: the blocks come from the host's ring, which has the daemon
            write them to the store
    alone   under another cache salt, so that the engine has to compute everything

The exit status is 1 if two of the three answers differ, or a later host has computed the system prompt.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import tiny_decoder
from chat_prefix import one_thread_each
from conversation import AGENTS, QUESTIONS, SYSTEM
from demonstration import OwnProcess, own_daemon
from figures import aligned
from hosts_network import hosts
from tiny_decoder import AGENT, BEGIN, USER

import tensord

BLOCK_TOKENS: Final = 32
GENERATED: Final = 16
START_S: Final = 300.0
"""Three engines start at once, each takes ten seconds alone."""
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass(frozen=True)
class Asked:
    """What one host says: the prompt's tokens, those that were computed the first and the second time, the blocks that
    came from other hosts, and whether the answers are equal."""

    prompt: int
    first: int
    again: int
    fetched: int
    same: bool


def engine(name: str, socket: Path, model: Path, orders: Connection) -> None:
    """An engine of one host: answers each question that `orders` bring with an `Asked`."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")  # those of vLLM's imports
    from vllm import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)
    llm: Any = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        use_tqdm_on_load=False,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config={
            "kv_connector": "TensordKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tensord.socket": str(socket)},
        },
    )

    def ask(tokens: list[int], salt: str | None = None) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt were computed for it."""
        prompt = {"prompt_token_ids": tokens} if salt is None else {"prompt_token_ids": tokens, "cache_salt": salt}
        (said,) = llm.generate([prompt], greedy, use_tqdm=False)
        return list(said.outputs[0].token_ids), len(tokens) - said.num_cached_tokens

    with tensord.Client(socket, name=name, required=True) as client:
        orders.send("ready")
        while (question := orders.recv()) is not None:
            tokens = [BEGIN, *tiny_decoder.tokens_of(SYSTEM), USER, *tiny_decoder.tokens_of(question), AGENT]
            first, computed = ask(tokens)
            fetched = client.status()["store"]["remote"].get("fetched", 0)
            settle(client)
            llm.reset_prefix_cache()
            second, again = ask(tokens)
            settle(client)
            third, _ = ask(tokens, f"alone on {name}")
            orders.send(Asked(len(tokens), computed, again, fetched, first == second == third))


def settle(client: tensord.Client) -> None:
    """Waits until what the engine has computed is in the ring, and what it has used from there is in the store.

    The engine puts its blocks, and reports their uses, after it has answered.
    """
    quiet_since, puts = time.monotonic(), None
    while time.monotonic() < quiet_since + 1:
        status = client.status()
        remote = status["remote"]
        if status["store"]["puts"] != puts or remote["queued"] or remote["writes"]:
            quiet_since, puts = time.monotonic(), status["store"]["puts"]
        time.sleep(0.05)


def main() -> int:
    if find_spec("vllm") is None:
        print("cluster_engines: this example needs vLLM: pip install '.[vllm,valkey]'", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-")))
        model = folder / "model"
        tiny_decoder.llama(tiny_decoder.weights()).save_pretrained(model)
        url, under = stack.enter_context(hosts(len(AGENTS), folder))
        engines = []
        for number, agent in enumerate(AGENTS):
            own = folder / f"host-{number}"
            own.mkdir()
            daemon = own_daemon(own, f"engines-{number}", under=under[number], ring_bytes="64MiB", remote_url=url)
            socket = stack.enter_context(daemon)
            with one_thread_each():
                engines.append(OwnProcess(agent, engine, socket, model))
            stack.callback(engines[-1].end)
        for one in engines:
            one.hear(START_S)
        told: list[Asked] = []
        for one in engines:
            one.tell(QUESTIONS[one.name])
            told.append(one.hear(START_S))
    return tell(told)


def tell(told: list[Asked]) -> int:
    """Prints the results. Returns the exit status."""
    rows = [["host", "prompt", "computed", "blocks from others", "again", "same answer"]]
    for number, one in enumerate(told):
        counts = (one.prompt, one.first, one.fetched, one.again)
        rows.append([f"host-{number}", *map(str, counts), "yes" if one.same else "NO"])
    print(f"\n{aligned(rows)}\n")
    computed, without = sum(one.first for one in told), sum(one.prompt for one in told)
    print(f"{len(told)} engines: {computed} tokens of prompts computed in the cluster, {without} without tensord")
    system = 1 + len(tiny_decoder.tokens_of(SYSTEM))
    shared = all(one.fetched and one.first <= one.prompt - system + BLOCK_TOKENS for one in told[1:])
    return 0 if shared and all(one.same for one in told) else 1


if __name__ == "__main__":
    sys.exit(main())
