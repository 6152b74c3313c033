"""An atheris target: a connection of either socket, fed with whatever the fuzzer finds.

Run it for long: `python tests/ipc/fuzz_connection.py -max_total_time=600`.
Its invariants: no exception, every descriptor comes back once, what is held is bounded, and a
failure is told. The first byte chooses the side, the rest is cut by the fuzzer's own choices.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports():
    from tensord.ipc.messages import control as m
    from tensord.ipc.messages.control import PROTOCOL_VERSION, ClientLimits
    from tensord.ipc.wire.connection import Connection
    from tensord.ipc.wire.frames import pack

LIMITS = ClientLimits(message_bytes_max=2048, requests_in_flight_max=8)


def connection_of(side: int) -> Connection:
    if side == 0:
        return Connection.status_server(LIMITS)
    if side == 1:
        return Connection.control_client()
    server = Connection.control_server(LIMITS)
    if side == 2:
        server.receive_data(pack(m.Hello(1, PROTOCOL_VERSION, "fuzz", 1, True)))
        server.send(m.Welcome(1, PROTOCOL_VERSION, "0", "i", 1, LIMITS))
        server.receive_data(pack(m.Attach(2)))
        server.send(m.Attached(2, 1, 0, 4096, 4096), fds=3)
    return server


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    connection = connection_of(provider.ConsumeIntInRange(0, 3))
    given, back, told, failures = 0, [], 0, 0
    while provider.remaining_bytes():
        size = provider.ConsumeIntInRange(1, 200)
        fds = range(given, given + provider.ConsumeIntInRange(0, 2))
        given += len(fds)
        arrival = connection.receive_data(provider.ConsumeBytes(size), tuple(fds))
        back += [fd for _, taken in arrival.messages for fd in taken] + arrival.discarded
        told += len(arrival.replies)
        failures += arrival.failure is not None
        connection.check_invariants()
        assert connection.held_bytes <= 65_536
    back += connection.close()
    assert sorted(back) == list(range(given))
    assert failures <= 1
    assert told or not failures or not connection.serving


def main() -> None:
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
