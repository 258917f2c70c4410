"""`python -m data_prep`."""

import sys

from data_prep.cli import main

sys.exit(main())
