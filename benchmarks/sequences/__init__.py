"""What prefix.py measures with: sequences that share prefixes as agents do, an index over them, and a filled daemon.

May import tensord and the peers' daemon. Owns no figure.
"""
