"""Servers on the host that are no clients, such as Ollama, and can be asked for their card's memory.

It imports HTTP of the standard library and the form of a neighbour's place, and nothing else of the daemon. It owns one
function for each kind of server, and the time of a question.
"""
