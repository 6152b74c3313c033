"""Runs the daemon: `python -m tensord.daemon`."""

from .app import main

raise SystemExit(main())
