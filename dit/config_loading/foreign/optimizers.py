"""Other tools' optimizers, by the names of their classes: AdamW, Muon, or refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from dit.config import OptimizerKind, RunConfig
from dit.config_loading.foreign.entry import Foreign, read_as, unused_key
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


def _said(value: Any, config: RunConfig, *, megatron: bool = False) -> str:
    """What AdamW in the place of this optimizer costs, or how learning rates of Muon differ."""
    ours = config.optimizer
    if (_name(value) in _MUON) is not (ours.kind is OptimizerKind.MUON):
        return f"read, not used: optimizer.kind={ours.kind} is set as well"
    if _name(value) in _MUON:
        return _of_muon(config, megatron=megatron)
    theirs, count = _MOMENTS.get(_name(value)), trained_count(config)
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


def _of_muon(config: RunConfig, *, megatron: bool) -> str:
    """Updates of other tools have other sizes; here they are as large as AdamW's."""
    width, ours = config.model.hidden_size, config.optimizer
    scale, factor = "sqrt(max(1, rows / columns))", 1 / (0.2 * math.sqrt(width))
    if megatron:
        scale, factor = "sqrt(max(rows, columns)) (muon_scale_mode=spectral)", 5.0
    return (
        "read as optimizer.kind=muon: whole matrices of attention and feed-forward, each linear"
        " by itself, and updates as large as AdamW's (0.2 sqrt(max(rows, columns)) times the"
        f" learning rate). With optimizer.lr={ours.lr:g} from a Muon that scales by {scale}, set"
        f" optimizer.lr={ours.lr * factor:.3g} and"
        f" optimizer.weight_decay={ours.weight_decay / factor:.3g}, which make the same step of a"
        f" matrix of {width} x {width}"
    )


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


OPTIMIZER = Foreign(reading=_kind, of_run=_said)
"""The key that names an optimizer."""
OF_MEGATRON = Foreign(reading=_kind, of_run=partial(_said, megatron=True))
"""Likewise in files of Megatron-Core's stacks."""
OF_MUON = {
    "momentum": read_as("optimizer.muon_momentum"),
    "nesterov": read_as("optimizer.muon_nesterov"),
    "ns_steps": read_as("optimizer.muon_steps"),
    "ns_coefficients": unused_key("optimizer.muon_coefficients names some"),
    "adjust_lr_fn": unused_key(
        "match_rms_adamw is how updates are scaled here, so that optimizer.lr keeps its value then"
    ),
}
"""Options of torch's Muon."""
_WHOLE = unused_key("each linear is orthogonalised by itself and as a whole")
_SCALE = unused_key("updates are as large as AdamW's: 0.2 sqrt(max(rows, columns))")
OF_MEGATRONS_MUON = {
    "muon_use_nesterov": read_as("optimizer.muon_nesterov"),
    "muon_num_ns_steps": read_as("optimizer.muon_steps"),
    "muon_split_qkv": _WHOLE,
    "muon_tp_mode": _WHOLE,
    "muon_scale_mode": _SCALE,
    "muon_extra_scale_factor": _SCALE,
    "muon_fp32_matmul_prec": unused_key("iterations are in float32 where the model is"),
}
"""Options of Megatron-Core's, beside `muon_momentum`, which is ours as well."""
OPTION = unused_key("the optimizer has no such option; optimizer.* are its keys")
"""An option of another optimizer."""
