"""What both connectors need of an engine: settings, a thread, its weights, its sleep, hooks of vLLM.

It may import vLLM, the client and the identity, and no other package of this folder. It owns the process's clients, the
hooks of vLLM's classes, and whether the weights are as they were when the engine started.
"""
