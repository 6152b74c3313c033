"""Tensors in this process's VRAM, and the device on which they lie.

Owns: `DeviceCache`; the interface of a device (interface.py); a card by torch (torch_device.py). `tensord.testing` has
a device that needs neither torch nor a GPU. Only making a TorchDevice imports torch.
"""
