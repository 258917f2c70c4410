"""Ranks that lose their launcher before they have met, each at another moment: `orphans.py FOLDER`.

Rank 0 waits in the store, rank 1 imports, rank 2 has not reached our code when the launcher dies,
and rank 3 waits for a child process, as a shell around a rank does. Each says that it is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    from dit.launched import meet, rank

    if rank() == 0:
        (folder / "0").touch()
        meet()
    (folder / str(rank())).touch()
    time.sleep(600)  # an import
    return 0


if __name__ == "__main__":
    folder, at = Path(sys.argv[1]), os.environ["RANK"]
    if at == "3" and len(sys.argv) == 2:
        sys.exit(subprocess.run([sys.executable, *sys.argv, "inside"]).returncode)
    if at == "2":
        (folder / "2").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    from dit.distributed.entry import run

    sys.exit(run(main))
