"""Keys of other stacks: what each is read as here, or what decides the matter instead.

A file written for those stacks loads: each of its keys is named, with the keys of ours that it is
read as, or with the reason why it is not used. A value that asks for something that is not done
here, where another value would be, is an error.

    entry           what stands for one key, and how its values are read
    dfm             NVIDIA's DFM and Megatron-Bridge
    automodel       NeMo AutoModel
    fastvideo       FastVideo
    diffusion_pipe  diffusion-pipe
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from dit.config.loading.foreign.automodel import AUTOMODEL
from dit.config.loading.foreign.dfm import DFM
from dit.config.loading.foreign.diffusion_pipe import DIFFUSION_PIPE
from dit.config.loading.foreign.diffusion_pipe import FLAGS as DIFFUSION_PIPE_FLAGS
from dit.config.loading.foreign.entry import Foreign
from dit.config.loading.foreign.fastvideo import FASTVIDEO
from dit.config.loading.foreign.fastvideo import FLAGS as FASTVIDEO_FLAGS

FOREIGN: dict[str, Foreign] = {**DIFFUSION_PIPE, **FASTVIDEO, **AUTOMODEL, **DFM}
# The one word that two of them use for different things: a scheduler's name, and a group.
FOREIGN["lr_scheduler"] = FASTVIDEO["lr_scheduler"]
FLAGS = ("seed", "mixed_precision", *FASTVIDEO_FLAGS, *DIFFUSION_PIPE_FLAGS)
"""What their command lines write as `--NAME VALUE`."""
_GROUPS = {
    ".".join(parts[:length])
    for parts in (key.split(".") for key in FOREIGN)
    for length in range(1, len(parts))
}


def foreign(key: str) -> Foreign | None:
    """What stands for a key of another stack, or None if the key is none."""
    exact = FOREIGN.get(key)
    if exact is not None:
        return exact
    return next((entry for name, entry in FOREIGN.items() if fnmatchcase(key, name)), None)


def is_foreign_group(key: str) -> bool:
    """Whether keys of another stack lie below this one."""
    return key in _GROUPS


__all__ = ["FLAGS", "FOREIGN", "Foreign", "foreign", "is_foreign_group"]
