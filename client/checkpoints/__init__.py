"""Names a model's weights by the content of its files on this host.

It owns which files are read, notes with digests of large files, and whether a file has changed since it was loaded. It
may import no other package of `client/`.
"""
