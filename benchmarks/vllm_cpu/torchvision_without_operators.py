"""Makes the Python part of torchvision importable beside a CPU build of torch.

torchvision's compiled operators need CUDA's libraries and cannot be loaded. The two modules that register fake and
autograd kernels for them fail at import; empty modules replace them. A .pth file loads this at the interpreter's start.
"""

import sys
import types

for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
    sys.modules.setdefault(name, types.ModuleType(name))
