"""What the daemon serves over HTTP: metrics for Prometheus, two health checks, and a page for browsers.

May import daemon/connections and daemon/process; it asks the actors for their documents, and changes nothing. Owns the
names of metrics, the figures of the page, and the part of HTTP that they need.
"""
