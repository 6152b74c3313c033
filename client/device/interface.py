"""The interface that DeviceCache needs of a device: a card on which tensors of this process lie.

Owns: the protocols Device and Mark, and the walk over a tree that all devices share. Does not own any device:
torch_device.py and tensord/testing/fake_vram.py do, and one conformance suite runs against both.

Trees are those that `tensord.Client.put` takes: dict, list, tuple and scalars around tensors. A tensor of the device is
a leaf; everything else goes through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from ...errors import UsageError

__all__ = ["Device", "Mark", "mapped"]


@runtime_checkable
class Mark(Protocol):
    """A point that one stream of a device was told to reach."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits, without the GIL, until the stream has reached it; False if it has not within `timeout_s`."""
        ...


@runtime_checkable
class Device(Protocol):
    """One card. Safe to use from several threads; not across a fork.

    Attributes:
        name: the daemon's name of the gauge of this card: a PCI address such as "0000:65:00.0", or what a fake card is
            called.
        reports: whether `reading()` may be sent to a daemon that has no GPU library of its own.
    """

    name: str
    reports: bool

    def reading(self) -> tuple[int, int]:
        """(used, total) bytes of the whole card, as its driver says: other processes included."""
        ...

    def size_of(self, tree: Any) -> int:
        """Bytes of this card that the tree's tensors hold. Memory that several of them share counts once, and whole.

        Raises:
            UsageError: a tensor lies on another device; the message names its place in the tree.
        """
        ...

    def mark(self) -> Mark:
        """The point that the calling thread's current stream has been told to reach. Cheap, and waits for nothing."""
        ...

    def lend(self, tree: Any) -> None:
        """Says that the calling thread's current stream is going to use the tree's tensors.

        They may have been made under another stream, which would else reuse their memory as soon as the last reference
        is dropped, whatever this one still does with it. Cheap, and waits for nothing.
        """
        ...

    def to_host(self, tree: Any, mark: Mark) -> Any:
        """A copy of the tree in host memory, complete when this returns: what the tensors held when `mark` was reached,
        which is waited for without the GIL. The tensors must not be written after it, nor dropped before this returns.

        Returns:
            The tree with a numpy array, or a CPU tensor, for every tensor; bfloat16 and float8 included.

        Raises:
            DeviceFull: a tensor that is no plain block of memory needs a copy on the card, which has no room for it.
        """
        ...

    def to_device(self, tree: Any) -> Any:
        """The tree with a tensor on this device for every numpy array and CPU tensor, complete when this returns, and
        lent to the calling thread's current stream.

        Raises:
            DeviceFull: the card has no room; nothing is left behind on it.
            UnsupportedLeaf: a dtype that the device's tensors cannot have.
        """
        ...

    def give_back(self) -> int:
        """Gives memory that this process holds for no tensor back to the driver. Returns how many bytes it got."""
        ...


def mapped(tree: Any, change: Callable[[Any, str], Any]) -> Any:
    """The tree with `change(leaf, place)` for every leaf; dicts, lists and tuples are made anew.

    Raises:
        UsageError: a container that contains itself.
    """
    return _mapped(tree, change, "tree", set())


def _mapped(node: Any, change: Callable[[Any, str], Any], place: str, within: set[int]) -> Any:
    kind = type(node)
    if kind is not dict and kind is not list and kind is not tuple:
        return change(node, place)
    if id(node) in within:
        raise UsageError(f"{place} is a {kind.__name__} that contains itself; pass a tree without cycles")
    within.add(id(node))
    try:
        if kind is dict:
            return {key: _mapped(child, change, f"{place}[{key!r}]", within) for key, child in node.items()}
        children = [_mapped(child, change, f"{place}[{at}]", within) for at, child in enumerate(node)]
        return children if kind is list else tuple(children)
    finally:
        within.discard(id(node))
