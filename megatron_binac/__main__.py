"""`python -m megatron_binac` is `binac`."""

from __future__ import annotations

import sys

from megatron_binac.cli import main

if __name__ == "__main__":
    sys.exit(main())
