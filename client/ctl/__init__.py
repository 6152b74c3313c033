"""tensorctl: the operator's queries, orders and checks of a daemon.

Owns: the program, the connection to a daemon, the arguments and the output that its rooms share: `show/`, `orders/`,
`doctor/`, `install/`. Does not own: any state. It may import `ipc/`, `shm/` and `client/identity`, and attaches to no
daemon: questions go to the read-only status socket, orders to the control socket.
"""

from .app import main as main
