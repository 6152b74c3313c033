"""Tensors in this process's VRAM.

Owns: `DeviceCache`; the interface of a device (interface.py); a GPU through torch (torch_device.py). Does not own: the
fake GPU in `tensord.testing`, which needs neither torch nor a GPU. Invariants: only making a TorchDevice imports torch.
"""
