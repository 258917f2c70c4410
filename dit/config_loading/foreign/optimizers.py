"""Other tools' optimizers, by the names of their classes: AdamW, Muon, or refused."""

from __future__ import annotations

import math
from typing import Any

from dit.config import RunConfig
from dit.config_loading.foreign.entry import Foreign, unused_key
from dit.models.cost import trained_count

_ADAMW = ("adam", "adamw", "adamwoptimi", "fusedadam")
_MOMENTS = {"adamw8bit": 2, "pagedadamw8bit": 2, "adamw8bitkahan": 2, "adamwfp8": 2, "adafactor": 0}
"""Bytes of moments that others keep of each number: one a moment. Adafactor (arXiv:1804.04235)
keeps a sum for each row and column of a matrix, some thousandths of a byte a number."""
_MUON = ("muon", "distmuon")


def _name(value: Any) -> str:
    """`bitsandbytes.optim.AdamW8bit` and `adamw_8bit` are `adamw8bit`."""
    return str(value).rpartition(".")[2].lower().replace("_", "")


def _kind(value: Any) -> dict[str, Any]:
    if _name(value) in _MUON:
        return {"optimizer.kind": "muon"}
    if value is not None and _name(value) not in (*_ADAMW, *_MOMENTS):
        raise ValueError(
            "is not supported: optimizers are AdamW and Muon, and learning rates of others do not"
            " fit; write AdamW, and a learning rate for it (1e-4 is usual for LoRA, 1e-5 for all"
            " weights)"
        )
    return {}


def _said(value: Any, config: RunConfig) -> str:
    """What AdamW in the place of this optimizer costs, or how learning rates of Muon differ."""
    if _name(value) in _MUON:
        return _of_muon(config)
    theirs, ours, count = _MOMENTS.get(_name(value)), config.optimizer, trained_count(config)
    if theirs is None:
        return f"read as AdamW, with moments in {ours.exp_avg_dtype} and {ours.exp_avg_sq_dtype}"
    each = ours.states.bytes
    return (
        f"read as AdamW: its two moments take {each} bytes for each of {count:,} trained numbers,"
        f" {_size(each * count)} over all ranks that share them, about"
        f" {_size((each - theirs) * count)} more than what {value} keeps. The blocks and the sums"
        " over rows that it keeps would change with the layout, and the run with them;"
        " optimizer.exp_avg_dtype and exp_avg_sq_dtype (bf16, fp16, fp8) keep less where"
        " Transformer Engine is"
    )


def _of_muon(config: RunConfig) -> str:
    """Updates of most tools have singular values of 1; here they are as large as AdamW's."""
    width, rate = config.model.hidden_size, config.optimizer.lr
    factor = 0.2 * math.sqrt(width)
    return (
        "read as optimizer.kind=muon: whole matrices of attention and feed-forward, each linear of"
        " Diffusers by itself, and updates as large as AdamW's (0.2 sqrt(max(rows, columns)) times"
        f" the learning rate). With optimizer.lr={rate:g} from a Muon that scales by"
        f" sqrt(max(1, rows / columns)), set optimizer.lr={rate / factor:.3g}, which makes the same"
        f" step of a matrix of {width} x {width}"
    )


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


OPTIMIZER = Foreign(reading=_kind, of_run=_said)
"""The key that names an optimizer."""
OPTION = unused_key("the optimizer has no such option; optimizer.* are its keys")
"""An option of another optimizer."""
