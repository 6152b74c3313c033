"""The Unix sockets of the daemon, and one session for each connection on them.

May import the actors, whose inboxes get the requests, and daemon/config, claims, reports, governor/forms and process.
Owns the files of the sockets, who may connect, how fast a uid may ask, and the answers that wait to be sent. Does not
own what a request does.
"""
