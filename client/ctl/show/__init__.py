"""The commands that show a running daemon: `status`, `health`, `ls`, `why`, `clients`, `watch`, `latency`, ….

It may import the daemon's answers (`daemon.py`), the arguments and the output of tensorctl, and no other room. It owns
the rows in which a document is shown, and changes nothing.
"""
