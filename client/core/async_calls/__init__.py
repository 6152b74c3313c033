"""The public calls of `AsyncClient`, in modules of the same names as those of `Client` (calls/).

A call that may wait runs the method of `Client` in a thread; any other runs it at once.
"""
