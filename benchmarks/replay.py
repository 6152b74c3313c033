"""Replays recorded and synthetic workloads through the store and other policies. Prints a table.

    python benchmarks/replay.py (--traces DIR [--warm DIR] | --synthetic) [--json PATH] [--only NAMES]
        [--policies NAMES] [--sizes PERCENTS] [--concurrency N,N] [--policy NAME] [--jobs N]

Owns: the command. Does not own: traces, drivers, other policies (replaying/).

With --warm the traces of that folder come first, uncounted, and those of --traces are counted. Without --warm the first
60 % of each trace are uncounted. The synthetic workloads follow; --synthetic replays only those. Sizes are shares of
all distinct blocks, counted and uncounted. tensord+steps, with agents' steps, replays only the three smallest sizes,
unless --sizes says which.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from peers.harness import table
from replaying import peers, policies, synthetic
from replaying.counts import Row
from replaying.traces import SOURCES, Request, Source, Trace, load

from tensord.daemon.config.config import SETTINGS
from tensord.daemon.replacement import POLICIES

Told = Callable[[str], None]
Task = tuple[str, str, float]
"""Trace, policy and share."""

SIZES_WITH_STEPS: Final = 3

# Worker processes inherit the traces by fork: a trace is too large to send for each task.
_replayed: tuple[dict[str, Trace], str] | None = None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replays recorded workloads through the store and other policies.")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="the folder of the traces")
    parser.add_argument("--synthetic", action="store_true", help="only the synthetic workloads")
    parser.add_argument("--warm", type=Path, metavar="DIR", help="a folder of traces to replay first, uncounted")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    parser.add_argument("--only", type=_only, default=[], metavar="NAMES", help="only these workloads; default: all")
    parser.add_argument(
        "--policies", type=_names, default=",".join(policies.NAMES), help=f"default: {','.join(policies.NAMES)}"
    )
    parser.add_argument("--sizes", type=_percents, metavar="PERCENTS", help="only these sizes of a trace")
    parser.add_argument("--concurrency", default="16", help="number of coding agents: 4, 16, 64; default: %(default)s")
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        default=_configured(),
        help="the store's; default, as configured: %(default)s",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.traces is None and not arguments.synthetic:
        parser.error("give --traces DIR, or --synthetic")
    return arguments


def _configured() -> str:
    """The default policy of the configuration."""
    return str(SETTINGS["policy"].default)


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(only: Sequence[str], concurrency: str) -> list[Source]:
    """The sources with these names; without names, all sources of that concurrency."""
    many = {f"agents-{number}" for number in concurrency.split(",")}
    return [s for s in SOURCES if s.name in (only or many) or not (only or "agents" in s.name)]


def workloads(arguments: argparse.Namespace) -> Iterator[tuple[Trace, tuple[float, ...]]]:
    """The traces to replay, each with its sizes."""
    for source in [] if arguments.synthetic else chosen(arguments.only, arguments.concurrency):
        try:
            recorded = load(source, arguments.traces, arguments.warm)
        except ValueError as error:
            sys.exit(f"replay.py: {error}")
        if recorded is None:
            _told(f"without {source.name}: {arguments.traces} has no {source.file}, nor the same with .xz")
        else:
            yield recorded, _sizes(source, arguments.sizes)
    for name in arguments.only or synthetic.WORKLOADS:
        if name in synthetic.WORKLOADS:
            made = synthetic.made(name)
            yield made, (synthetic.share(made),)


def _sizes(source: Source, percents: Sequence[float] | None) -> tuple[float, ...]:
    """The sizes to replay a recorded trace at."""
    return tuple(
        share
        for share in source.shares
        if not percents or min(abs(share - percent / 100) for percent in percents) < 1e-9
    )


def tasks_of(trace: Trace, names: Sequence[str], sizes: Sequence[float], *, all_sizes: bool) -> list[Task]:
    """The replays of one trace.

    Unless `all_sizes`, steps are sent only at the three smallest sizes: a replay through the store takes up to four
    minutes.
    """
    some = {"tensord+steps": sizes[:SIZES_WITH_STEPS]}
    return [
        (trace.name, name, size)
        for name in names
        if policies.suits(name, trace)
        for size in (sizes if all_sizes else some.get(name, sizes))
    ]


def replay(traces: dict[str, Trace], tasks: Sequence[Task], policy: str, jobs: int, told: Told) -> Iterator[Row]:
    """Yields a row for each task as it ends.

    The longest tasks start first, so that no process waits for another at the end.
    """
    global _replayed
    _replayed = traces, policy
    blocks = {name: _blocks(trace) for name, trace in traces.items()}
    tasks = sorted(tasks, key=lambda task: (task[1] in policies.OURS, blocks[task[0]]), reverse=True)
    if jobs == 1:
        for task in tasks:
            yield _done(_replay(task), told)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for future in as_completed([pool.submit(_replay, task) for task in tasks]):
            yield _done(future.result(), told)


def _blocks(trace: Trace) -> int:
    """The number of blocks that all requests ask for."""
    return sum(len(event.blocks) for event in trace.events if isinstance(event, Request))


def _replay(task: Task) -> tuple[Row, float]:
    assert _replayed is not None
    (of, name, share), (traces, policy) = task, _replayed
    trace = traces[of]
    began = time.perf_counter()
    counts = policies.replay(name, trace, trace.share_bytes(share), policy)
    return Row.of(trace.name, name, share, counts), time.perf_counter() - began


def _done(result: tuple[Row, float], told: Told) -> Row:
    row, seconds = result
    told(f"{row.trace} {_percent(row.size)} {row.policy}: {row.prefix_hit:.1f} % of prefixes in {seconds:.0f} s")
    return row


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def rows_table(rows: Sequence[Row]) -> str:
    """One line for each trace and policy, one column for each size of the trace."""
    found = {(row.trace, row.policy, row.size): row for row in rows}
    parts = []
    for trace in dict.fromkeys(row.trace for row in rows):
        sizes = sorted({row.size for row in rows if row.trace == trace})
        lines = []
        for policy in policies.NAMES:
            cells = [found.get((trace, policy, size)) for size in sizes]
            if any(cells):
                lines.append([policy, *(_cell(row) for row in cells)])
        parts.append(table([trace, *map(_percent, sizes)], lines))
    return "\n\n".join(parts)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    saved = 100 * row.tokens_saved / row.tokens if row.tokens else 0.0
    return f"{row.object_hit:5.1f}{row.byte_hit:6.1f}{row.prefix_hit:6.1f}{saved:6.1f}"


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Writes the rows as a list of objects."""
    path.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


def _names(given: str) -> list[str]:
    names = given.split(",")
    unknown = [name for name in names if name not in policies.NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a policy; choose from {', '.join(policies.NAMES)}")
    return names


def _only(given: str) -> list[str]:
    names = given.split(",") if given else []
    known = [*(source.name for source in SOURCES), *synthetic.WORKLOADS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a workload; choose from {', '.join(known)}")
    return names


def _percents(given: str) -> list[float]:
    try:
        return [float(percent) for percent in given.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is not a list of percents such as 1,5,10") from None


def main() -> int:
    arguments = _arguments()
    names = arguments.policies
    missing = peers.missing()
    if missing is not None:
        _told(f"without other policies: {missing}")
        names = [name for name in names if name in policies.OURS or name == "belady"]
    rows: list[Row] = []
    traces: dict[str, Trace] = {}
    tasks: list[Task] = []
    for trace, sizes in workloads(arguments):
        traces[trace.name] = trace
        tasks += tasks_of(trace, names, sizes, all_sizes=arguments.sizes is not None)
    order = {task: place for place, task in enumerate(tasks)}
    began = time.perf_counter()
    for row in replay(traces, tasks, arguments.policy, arguments.jobs, _told):
        rows.append(row)
        rows.sort(key=lambda row: order[row.trace, row.policy, row.size])
        if arguments.json:
            write_json(arguments.json, rows)
    _told(f"{len(rows)} rows in {time.perf_counter() - began:.0f} s")
    if not rows:
        _told(
            f"nothing was replayed: {arguments.traces} has no file of these traces with a request at one of these sizes"
        )
        return 1
    print(f"the store's policy: {arguments.policy}; Python {sys.version.split()[0]}\n")
    print("hits in percent: of blocks, of their bytes, of blocks as a prefix; and tokens saved in percent\n")
    print(rows_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
