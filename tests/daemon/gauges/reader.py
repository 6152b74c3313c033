"""Reads a source in a process of its own: the libraries' state, and what tests do to them, end with it.

`python reader.py SOURCE [ROOT]`; each line of standard input is a time to read at, answered with one line of JSON:
{"gauges": {name: [used, total] or "why not"}, "shown": {name: further fields}}, or {"failed": why, "absent": whether
nothing is there to read}. A line `close` closes the source, and is answered with {}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tensord.daemon.gauges import sources
from tensord.daemon.gauges.reading import GaugeAbsent, GaugeFailed, Reading, Source
from tensord.ipc.messages.modes import Tier


def answer(source: Source, now: float) -> dict[str, Any]:
    try:
        result = source.read(now)
    except GaugeFailed as failed:
        return {"failed": str(failed), "absent": isinstance(failed, GaugeAbsent)}
    return {
        "gauges": {
            name: [got.used_bytes, got.total_bytes] if isinstance(got, Reading) else str(got)
            for name, got in result.items()
        },
        "shown": {name: got.shown for name, got in result.items() if isinstance(got, Reading)},
    }


def main() -> None:
    # What libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    (source,) = sources.opened(Tier.DEVICE, sys.argv[1], Path(sys.argv[2] if sys.argv[2:] else "/"))
    for line in sys.stdin:
        if line == "close\n":
            source.close()
            answers.write("{}\n")
        else:
            answers.write(json.dumps(answer(source, float(line))) + "\n")
        answers.flush()
    source.close()


if __name__ == "__main__":
    main()
