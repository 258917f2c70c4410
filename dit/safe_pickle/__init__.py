"""Unpickling that runs no code of the file, whatever its bytes are.

Shards, caches and checkpoints are handed around among strangers, and plain unpickling runs what
they wrote. Here a name in a pickle is looked up in a table and never imported, each value is built
by a function of ours that checks its arguments, and the whole takes memory and time in proportion
to the file.

1. `limits`    how much a file may make, and of what
2. `values`    the names that a pickle may hold, and the tensors, arrays and numbers they make
3. `machine`   the opcodes of a pickle
4. `archives`  plain pickles, and both archives of `torch.save`
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["loads"]


def loads(
    data: bytes, *, classes: Iterable[type] = (), former_names: Mapping[str, type] | None = None
) -> Any:
    """The object that pickle or `torch.save` wrote as `data`.

    It consists of tensors, NumPy arrays and scalars of numeric types, plain values and plain
    containers, and of instances of `classes`, whose contents the caller has to check. A class that
    has moved is known by its former names, too: `former_names` has the dotted name of each.

    Raises:
        pickle.UnpicklingError: it holds anything else, or is damaged.
    """
    # Most runs read no pickle; the modules are imported when the first one comes.
    from dit.safe_pickle.unpickler import DAMAGE, read
    from dit.safe_pickle.values import check_plain, short

    allowed = {(cls.__module__, cls.__qualname__): cls for cls in classes}
    for name, cls in (former_names or {}).items():
        module, _, qualname = name.rpartition(".")
        allowed[module, qualname] = cls
    try:
        value = read(data, allowed)
        check_plain(value, frozenset(allowed.values()))
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(short(error)) from None
    except DAMAGE as error:
        what = f"the pickle is damaged ({type(error).__name__}: {short(error)})"
        raise pickle.UnpicklingError(what) from None
    return value
