"""Runs the command line of data preparation: `python -m data_prep`."""

import signal
import sys

from data_prep.cli.parser import main
from dit.streams import with_streams

# Schedulers end a job with SIGTERM: it says what was kept and what to do, as after Ctrl-C.
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(with_streams(main))
