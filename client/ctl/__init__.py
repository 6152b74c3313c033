"""tensorctl: the operator's queries, orders and checks of a daemon.

Owns: the commands and their output. Does not own: any state. Displayed data comes from the read-only status socket.
Changes go over the control socket, without attaching. `purge` frees memory only of instances whose lock is free.
"""

from .app import main as main
