"""A GPU of this process: what a device must be able to do, and the parts of doing it through torch and the driver.

It imports payloads and errors, and torch only where a GPU is used; nothing of the client but this package. It owns the
pause during captures of CUDA graphs, private pools of memory, and the names of GPUs.
"""
