"""A connection that is about to end serves nobody, and those who wait for the next one learn of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tensord.client.core.attachment import Attachment
from tensord.ipc.blocking import BlockingChannel
from tensord.ipc.connection import Connection

from ...daemon_process import PATIENCE_S


@pytest.fixture
def attachment() -> Iterator[Attachment]:
    """With a channel that serves."""
    ours, theirs = socket.socketpair()
    attachment = Attachment()
    channel = attachment.channel = BlockingChannel(ours, Connection.control_client())
    attachment.serve(channel)
    attachment.settle()
    assert attachment.serving is channel and not attachment.renewing
    yield attachment
    channel.close()
    theirs.close()


def test_a_channel_that_this_process_has_ended_serves_nobody_from_then_on(attachment: Attachment) -> None:
    channel = attachment.channel
    assert channel is not None
    attachment.end()
    assert attachment.serving is None and attachment.renewing
    assert attachment.detach(channel), "another attempt follows at once"
    assert attachment.renewing
    attachment.settle()
    assert not attachment.renewing


def test_nobody_waits_after_the_daemon_has_ended_the_connection(attachment: Attachment) -> None:
    channel = attachment.channel
    assert channel is not None
    assert not attachment.detach(channel)
    assert attachment.serving is None and not attachment.renewing
    attachment.wait_renewed(PATIENCE_S)


def test_those_who_wait_for_the_next_connection_learn_of_it(attachment: Attachment) -> None:
    channel = attachment.channel
    assert channel is not None
    attachment.end()
    renewed = threading.Event()

    def wait() -> None:
        attachment.wait_renewed(2 * PATIENCE_S)
        renewed.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    attachment.detach(channel)
    assert not renewed.is_set()
    attachment.settle()
    waiting.join(PATIENCE_S)
    assert renewed.is_set()
