"""vLLM's processor cache on tensord: what one frontend's processor has made, all frontends and engines of a host use.

It may import vLLM, the client's processor cache, the identity and the package of the engine. It owns the classes that
vLLM calls, the form of items and references, and which of vLLM's hashes stand for content.
"""
