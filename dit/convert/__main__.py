"""`python -m dit.convert`."""

import sys

from dit.convert.cli import main

if __name__ == "__main__":
    sys.exit(main())
