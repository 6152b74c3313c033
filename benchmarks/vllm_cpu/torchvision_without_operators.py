"""Lets torchvision's Python part be imported beside a CPU build of torch.

Its compiled operators are linked against CUDA's libraries and cannot be loaded there; the two modules that
register fake and autograd kernels for them would fail at import, so empty ones stand in their place. Loaded
by a .pth file at the start of the interpreter.
"""

import sys
import types

for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
    sys.modules.setdefault(name, types.ModuleType(name))
