"""`python -m rollout_spec.cli`, the same as `rollout-spec`."""

from __future__ import annotations

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
