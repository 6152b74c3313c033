"""`python -m tensord.daemon`."""

from .app import main

raise SystemExit(main())
