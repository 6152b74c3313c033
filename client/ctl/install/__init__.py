"""`tensorctl install`: puts the service's files in place under systemd, and removes them again.

It may import the facts of `doctor/` and the arguments of tensorctl. It owns the units, and neither the
package, the user tensord, the shared memory nor a configuration file that the operator has changed.
"""
