"""Tensors in this process's VRAM: the device that they lie on.

Owns: what a device is to the cache (interface.py), a card by torch (torch_device.py), and one that needs neither torch
nor a GPU (fake_vram.py over fake_card.py). Imports none of them: torch is loaded by whoever makes a TorchDevice.
"""
