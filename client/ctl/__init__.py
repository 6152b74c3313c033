"""tensorctl: the operator's queries, orders and checks of a daemon.

Owns: the program and its commands, the connection to a daemon, arguments and output. Does not own: any state. It may
import `ipc/` and `shm/`, and attaches to no daemon: questions go to the read-only status socket,
orders to the control socket.
"""

from .app import main as main
