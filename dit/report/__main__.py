"""`python -m dit.report`."""

import sys

from dit.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
