"""The same client for asyncio. Lookups are too short to wait for; whatever may wait is awaited.

Owns nothing but the difference: it drives the same steps, and waits on the loop instead of in the thread.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar, cast

import numpy as np

from ..errors import TimedOut
from ..ipc import messages
from ..shm.tree import encode
from .cache import TIMEOUT_S, Client, Keys
from .lease import Batch, Lease
from .namespace import Namespace
from .once import Answer, Compute, Tally, compute_once
from .puts import Put, Reservation
from .view import Entry

Value = TypeVar("Value")


class AsyncClient:
    """`Client` with `await`. See there for arguments, results and errors.

    Connecting happens in the background: `await AsyncClient.open()` waits for it, the constructor does not.
    """
