"""What gpu_check.py checks and times on an NVIDIA card: scenes of the device cache, and the KV connector's copies.

May import tensord, torch and the peers' daemon. Owns the cards, real or stand-ins, and the report of what held.
"""
