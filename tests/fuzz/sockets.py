"""Fuzzes the daemon's two sockets with messages and descriptors of a hostile peer."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from typing import Any, Final

from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION
from tensord.ipc.wire import connection
from tensord.ipc.wire.frames import pack
from tensord.shm.ring.segments import create_inbox

from . import words
from .besieged import Besieged

INPUTS: Final = 120
WAIT: Final[tuple[bytes, list[int]]] = (b"", [])
CHECK_EVERY: Final = 20
# Limit is left out. After a valid one the daemon rightly refuses the witness client's puts.
_CONTROL: Final = [kind for kind in connection.CONTROL_REQUESTS.values() if kind is not messages.Limit]
_STATUS: Final = list(connection.STATUS_REQUESTS.values())
_ANY: Final = [*_CONTROL, *_STATUS, *connection.CONTROL_ANSWERS.values(), *connection.STATUS_ANSWERS.values()]


def control(chance: random.Random, besieged: Besieged) -> None:
    for number in range(INPUTS):
        inbox = words.stored_tree(chance)[0].ljust(words.INBOX_BYTES, b"\0")
        with ExitStack() as stack:
            said: list[tuple[bytes, list[int]]] = []
            if chance.random() < 0.9:
                said.append((pack(messages.Hello(1, PROTOCOL_VERSION, "hostile", 1, chance.random() < 0.8)), []))
                said += [WAIT] * (chance.random() < 0.95)
            if chance.random() < 0.7:
                said.append((pack(messages.Attach(2)), []))
                said += [WAIT] * (len(said) == 3)
            if chance.random() < 0.6:
                fd = create_inbox(words.INBOX_BYTES)
                stack.callback(os.close, fd)
                os.pwrite(fd, chance.choice([inbox, chance.randbytes(4096)]), 0)
                said.append((pack(messages.OpenInbox(3, words.INBOX_BYTES)), [fd]))
            requests = _CONTROL if chance.random() < 0.9 else _ANY
            for each in words.conversation(chance, requests):
                fds: list[int] = []
                while chance.random() < 0.1 or (each.get("type") in ("Attach", "OpenInbox") and not fds):
                    fds.append(stack.enter_context(words.descriptor(chance, inbox)))
                said.append((words.packed(chance, each), fds[:8]))
            if chance.random() < 0.1:
                said.append((chance.randbytes(chance.randrange(1, 4000)), []))
            besieged.tell(besieged.daemon.socket, said, chance)
        if not number % CHECK_EVERY:
            besieged.check()
    besieged.settle()


def status(chance: random.Random, besieged: Besieged) -> None:
    for number in range(INPUTS):
        with ExitStack() as stack:
            requests: list[type[Any]] = _STATUS if chance.random() < 0.8 else _ANY
            said = []
            for each in words.conversation(chance, requests):
                fds = [stack.enter_context(words.descriptor(chance))] if chance.random() < 0.1 else []
                said.append((words.packed(chance, each), fds))
            if chance.random() < 0.2:
                said.insert(chance.randrange(len(said) + 1), (chance.randbytes(chance.randrange(1, 4000)), []))
            besieged.tell(besieged.daemon.status_socket, said, chance)
        if not number % CHECK_EVERY:
            besieged.check()
    besieged.settle()
