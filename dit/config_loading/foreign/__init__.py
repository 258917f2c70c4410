"""Keys of other tools: what each is read as here, or why it is not used.

A file written for one of these tools loads. Each of its keys is logged, with our keys that it is
read as or the reason why it is not used. A value that asks for something unsupported is an error
where another value of the key would be supported. These tables are imported only when a
configuration has a key that is not ours.

    entry           `Foreign`: how one key and its values are read
    optimizers      names of optimizers, which several of the tools have
    dfm             NVIDIA's DFM and Megatron-Bridge
    automodel       NeMo AutoModel
    fastvideo       FastVideo
    diffusion_pipe  diffusion-pipe
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from dit.config_loading.foreign.automodel import AUTOMODEL
from dit.config_loading.foreign.dfm import DFM
from dit.config_loading.foreign.diffusion_pipe import DIFFUSION_PIPE
from dit.config_loading.foreign.diffusion_pipe import FLAGS as DIFFUSION_PIPE_FLAGS
from dit.config_loading.foreign.entry import Foreign
from dit.config_loading.foreign.fastvideo import FASTVIDEO
from dit.config_loading.foreign.fastvideo import FLAGS as FASTVIDEO_FLAGS

FOREIGN: dict[str, Foreign] = {**DIFFUSION_PIPE, **FASTVIDEO, **AUTOMODEL, **DFM}
# Two of the tools use this key, one for the name of a scheduler, the other for a group of keys.
FOREIGN["lr_scheduler"] = FASTVIDEO["lr_scheduler"]
FLAGS = ("seed", "mixed_precision", *FASTVIDEO_FLAGS, *DIFFUSION_PIPE_FLAGS)
"""Options that the command lines of these tools write as `--NAME VALUE`."""
_GROUPS = {
    ".".join(parts[:length])
    for parts in (key.split(".") for key in FOREIGN)
    for length in range(1, len(parts))
}


def foreign(key: str) -> Foreign | None:
    """The entry of a key of another tool, or None if no tool has the key."""
    exact = FOREIGN.get(key)
    if exact is not None:
        return exact
    return next((entry for name, entry in FOREIGN.items() if fnmatchcase(key, name)), None)


def is_foreign_group(key: str) -> bool:
    """Whether another tool has keys below this one."""
    return key in _GROUPS
