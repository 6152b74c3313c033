"""Caches for encoder outputs and visual embeddings, for an engine of one's own; `processor/` has that of processors.

May import the client's core and its packages for puts and arguments; no adapter, and not `prefix`. Owns an
engine's budget of encoder tokens, and what is stored beside an embedding; each cache can be used without the others.
"""
