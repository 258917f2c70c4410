"""`python -m data_prep`."""

import sys

from data_prep.cli.parser import main

sys.exit(main())
