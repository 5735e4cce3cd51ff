"""Entry point: `python -m weftline.gpu_check`."""

from __future__ import annotations

import sys

from weftline.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
