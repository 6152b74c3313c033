"""Two processes generate with transformers after one long system prompt, which only one of them computes.

    python examples/shared_kv.py [--json PATH]

Each process makes the same tiny Llama (`tiny_decoder.py`: random weights from a seed, no downloads) and generates
through `tensord.client.transformers.prefix_cached`. Both first ask a question of their own, then a follow-up question,
which continues their own answer. Every answer is compared to one that `model.generate` gives without tensord.

The exit status is 1 if an answer differs, or if a process computed tokens that it should have found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import tiny_decoder
from chat_prefix import RING_BYTES, one_thread_each
from conversation import FOLLOW_UP, QUESTIONS, SYSTEM
from demonstration import PATIENCE_S, OwnProcess, own_daemon
from tiny_decoder import AGENT, BEGIN, USER

import tensord

PROCESSES: Final = ("planner", "coder")
GENERATED: Final = 24
START_S: Final = 300.0
"""Two processes import transformers at once, which takes each of them ten seconds alone."""


@dataclass(frozen=True)
class Answer:
    """The report of one call of `generate`.

    `prompt`, `found`, `computed`: tokens of the prompt, in all, from the cache, and computed here. `same`: whether the
    answer is that of the model without the cache. `reasons`: why a call did not use the cache.
    """

    process: str
    prompt: int
    found: int
    computed: int
    same: bool
    said: str
    reasons: list[str]


def be_process(name: str, socket: Path, orders: Connection) -> None:
    """Asks what `orders` say, and answers each with an `Answer`."""
    import torch

    from tensord.client.transformers import prefix_cached

    torch.set_num_threads(1)  # two processes share the machine
    model = tiny_decoder.llama(tiny_decoder.weights())
    with tensord.Client(socket, name=name, timeout_s=PATIENCE_S, required=True) as client:
        # These two lines are all that sharing needs.
        shared = prefix_cached(model, client, agent=name)
        generate = shared.generate

        tokens = [BEGIN, *tiny_decoder.tokens_of(SYSTEM)]
        orders.send("ready")
        while (question := orders.recv()) is not None:
            tokens += [USER, *tiny_decoder.tokens_of(question), AGENT]
            ids = torch.tensor([tokens])
            given: dict[str, Any] = {
                "attention_mask": torch.ones_like(ids),
                "max_new_tokens": GENERATED,
                "do_sample": False,
                "pad_token_id": 0,
            }
            before = shared.tally.found_tokens
            output = generate(ids, **given)
            found = shared.tally.found_tokens - before
            wanted = model.generate(ids, **given)
            if not shared.flush(PATIENCE_S):  # so that the other process finds all of it
                raise RuntimeError(f"the daemon did not store the sequence within {PATIENCE_S:g} s")
            answer = output[0, len(tokens) :].tolist()
            same = bool(torch.equal(output, wanted))
            said, reasons = tiny_decoder.text_of(answer), list(shared.tally.reasons)
            orders.send(Answer(name, len(tokens), found, len(tokens) - found, same, said, reasons))
            tokens += answer


def why_not() -> str | None:
    """Why the example cannot run here; None if it can."""
    if tiny_decoder.best_kind() != "transformers":
        return "this example needs torch and transformers: pip install '.[transformers]'"
    from tensord.client.transformers.conditions import NotShared
    from tensord.client.transformers.language.families import check_model

    try:
        check_model(tiny_decoder.llama(tiny_decoder.weights()))
    except NotShared as reason:
        return str(reason)
    return None


def run() -> list[Answer]:
    """Runs and prints all answers."""
    system = 1 + len(tiny_decoder.tokens_of(SYSTEM))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-")))
        socket = stack.enter_context(own_daemon(folder, "kv", ring_bytes=RING_BYTES))
        processes = []
        with one_thread_each():
            for name in PROCESSES:
                processes.append(OwnProcess(name, be_process, socket))
                stack.callback(processes[-1].end)
        for process in processes:
            process.hear(START_S)
        print(
            f"{len(PROCESSES)} processes, a system prompt of {system} tokens, a tiny Llama in transformers\n\n"
            f"{'':<20} {'prompt':>6} {'found':>6} {'computed':>8}  same answer",
            flush=True,
        )
        answers = []
        for what, questions in (("a question", QUESTIONS), ("a follow-up", dict.fromkeys(PROCESSES, FOLLOW_UP))):
            for process in processes:
                process.tell(questions[process.name])
                answers.append(process.hear())
                tell(what, answers[-1])
    return answers


def tell(what: str, answer: Answer) -> None:
    numbers = f"{answer.prompt:>6} {answer.found:>6} {answer.computed:>8}"
    print(f"{answer.process:<8} {what:<11} {numbers}  {'yes' if answer.same else 'NO'}", flush=True)


def failures(answers: Sequence[Answer]) -> list[str]:
    """The failed expectations, one line each."""
    system = 1 + len(tiny_decoder.tokens_of(SYSTEM))
    failed = [f"{one.process}: the answer differs from the one without the cache" for one in answers if not one.same]
    failed += [f"{one.process}: {reason}" for one in answers for reason in one.reasons]
    first, second, *follow_ups = answers
    if first.found:
        failed.append(f"{first.process} found {first.found} tokens in an empty cache")
    if second.found < system:
        failed.append(f"{second.process} found {second.found} tokens of a system prompt of {system}")
    for before, one in zip((first, second), follow_ups, strict=True):
        if one.found < before.prompt:
            failed.append(f"{one.process} found {one.found} tokens, fewer than its own prompt of {before.prompt}")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Two processes of transformers share a system prompt.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the answers there")
    given = parser.parse_args(argv)
    if (why := why_not()) is not None:
        print(f"shared_kv: {why}", file=sys.stderr)
        return 2
    answers = run()
    print()
    for name in PROCESSES:
        own = [answer for answer in answers if answer.process == name]
        computed, without = sum(answer.computed for answer in own), sum(answer.prompt for answer in own)
        print(f"{name:<8} {computed:>6} tokens of prompts computed, without the cache {without:>6}")
    if given.json:
        given.json.write_text(json.dumps([asdict(answer) for answer in answers], indent=1) + "\n")
    failed = failures(answers)
    for failure in failed:
        print(f"shared_kv: {failure}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
