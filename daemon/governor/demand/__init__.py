"""What is going to be needed: the steps of agents, and the blocks that keep a device's queue of requests bounded.

It imports messages and errors, and no other room of the governor. It owns the workflows of all clients, and the counts
of their requests.
"""
