"""Segments: their files, their layout, and how much memory they may take.

It may import only `tensord.errors`. It owns the byte layout of ring, index and lanes (`layout`), the creation, checks
and removal of their files, and what a fork keeps from its child.
"""
