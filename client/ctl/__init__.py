"""tensorctl: what an operator asks a daemon, tells it, and checks around it.

Owns: the commands and what they print. Does not own any state: what it shows comes from the read-only status socket,
what it changes goes over the control socket, without attaching; what `purge` frees is what the shared memory's own lock
says nobody serves.
"""

from .app import main as main
