"""Asks an HTTP server on a Unix socket or on a port of 127.0.0.1, as the daemon's pages and metrics are."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

from .daemon_process import PATIENCE_S


def connect(at: Path | int) -> socket.socket:
    if isinstance(at, int):
        return socket.create_connection(("127.0.0.1", at), timeout=PATIENCE_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(at))
    return sock


def asked(
    at: Path | int, path: str, method: str = "GET", host: str = "localhost", body: bytes | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(host)
    connection.sock = connect(at)
    connection.request(method, path, body=body, headers={"Host": host, **headers})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text
