"""Reads a source in a process of its own: the libraries' state, and what tests do to them, end with it.

`python reader.py SOURCE [ROOT]`; each pickled time on standard input is read at, and answered with the pickled result,
or with the GaugeFailed. None closes the source, and is answered with {}.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from tensord.daemon.gauges import sources
from tensord.daemon.gauges.reading import GaugeFailed, Result
from tensord.ipc.messages.modes import Tier


def main() -> None:
    # What libraries print goes to standard error.
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    (source,) = sources.opened(Tier.DEVICE, sys.argv[1], Path(sys.argv[2] if sys.argv[2:] else "/"))
    while asked.peek(1):
        answer: Result | GaugeFailed = {}
        now = pickle.load(asked)
        if now is None:
            source.close()
        else:
            try:
                answer = source.read(now)
            except GaugeFailed as failed:
                answer = failed
        pickle.dump(answer, answers)
        answers.flush()
    source.close()


if __name__ == "__main__":
    main()
