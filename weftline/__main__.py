"""Entry point: `python -m weftline`."""

import sys

from weftline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
