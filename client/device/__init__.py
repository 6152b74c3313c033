"""Tensors that stay in this process's VRAM until the daemon orders their eviction: `DeviceCache` and `TorchDevice`.

It may import the client's core and the packages below it; only making a TorchDevice imports torch. It owns the
table of entries and leases, what the daemon knows of them, and the moves between the card and the ring.
"""
