"""`python -m tensord.client.ctl`."""

from .app import main

raise SystemExit(main())
