"""pretrain_dit.py that says all the time what it does, for a test that wants to kill it there.

python tests/phases.py FILE [arguments of pretrain_dit.py ...]

FILE holds the step that the first process is at, and what it does: step, validation, gather (the
part of a save that training waits for), publish, or loop, which is between these. What is written
in the background is to be seen in the folder of checkpoints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dit.distributed import entry
from recipes import pretrain_dit


def watch(file: Path) -> None:
    """Wraps what the loop calls, so that each tells that it begins."""
    from dit.train import trainer, validation
    from dit.train.checkpoint import saving

    partial = file.with_suffix(".new")
    run: list[Any] = []
    before = ["loop"]

    def tell(phase: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            partial.write_text(f"{run[0].progress.step} {phase}")
            partial.replace(file)

    def telling(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not run:
                run.append(args[0])
            before.append(phase)
            tell(phase)
            try:
                return function(*args, **kwargs)
            finally:
                before.pop()
                tell(before[-1])

        return wrapped

    trainer._step = telling("step", trainer._step)
    validation.validate = telling("validation", validation.validate)
    trainer.save = telling("gather", trainer.save)
    trainer.finish_save = saving.finish_save = telling("publish", trainer.finish_save)


def main() -> int:
    from dit.distributed.process_groups import run_megatron_on_cpu

    run_megatron_on_cpu()
    watch(Path(sys.argv[1]))
    return pretrain_dit.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(entry.run(main))
