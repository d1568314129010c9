"""`python -m ikcli` is `ik`."""

from __future__ import annotations

import sys

from ikcli.main import main

sys.exit(main())
