"""Reads pickles without ever running code from the file, whatever its bytes.

Shards, caches and checkpoints are exchanged among people who do not know each other, and plain
unpickling runs the code in them. This package looks names up in a table and never imports them,
builds each value by a function of its own that checks the arguments, and keeps memory and time in
proportion to the size of the file.

unpickler  the opcodes of a pickle, and both archives of `torch.save`
values     the names that a pickle may contain, the values they build, and limits on both
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any


def loads(
    data: bytes, *, classes: Iterable[type] = (), former_names: Mapping[str, type] | None = None
) -> Any:
    """The object that pickle or `torch.save` wrote as `data`.

    The object consists of tensors, NumPy arrays and scalars of numeric types, plain values, plain
    containers, and instances of `classes`, whose contents the caller has to check. `former_names`
    maps dotted names of classes in older files to the present classes.

    Raises:
        pickle.UnpicklingError: the data hold anything else, or are damaged.
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
        what = (
            f"the pickle is damaged ({type(error).__name__}: {short(error)}); copy or save the"
            " file again"
        )
        raise pickle.UnpicklingError(what) from None
    return value
