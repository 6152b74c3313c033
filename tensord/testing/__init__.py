"""A fake GPU that needs neither a GPU nor torch, for tests and demonstrations of programs that use `DeviceCache`.

Owns: `FakeCard`, the account of one card's bytes, shared by all processes that open it; `FakeVram`, the device on that
card, an argument of `DeviceCache`; `FakeTensor`, a tensor on the device; `FakeStream`, which executes work in order.

Example:
    >>> import tempfile
    >>> from tensord.testing import FakeCard, FakeVram
    >>> device = FakeVram(FakeCard(tempfile.mkdtemp(), "card0", 1 << 30))
"""

from .fake_card import FakeCard as FakeCard
from .fake_stream import FakeStream as FakeStream
from .fake_vram import FakeTensor as FakeTensor
from .fake_vram import FakeVram as FakeVram
