"""tensord in vLLM: encoder outputs, processor outputs and KV blocks shared by all engines of a host.

It may import vLLM, the client and the identity. It owns the plugin, and the connectors that vLLM's configuration names.
It imports nothing by itself: each of vLLM's processes imports this package for the plugin.
"""
