"""Names of other tools' optimizers, which are read as AdamW or Muon, or refused."""

from __future__ import annotations

from typing import Any

from dit.foreign.entry import Foreign, read_as, unused_key

_ADAMW = ("adam", "adamw", "adamwoptimi", "fusedadam")
_MOMENTS = {"adamw8bit": 2, "pagedadamw8bit": 2, "adamw8bitkahan": 2, "adamwfp8": 2, "adafactor": 0}
"""Bytes of moments for each trained number in other optimizers: one for each 8-bit moment.
Adafactor (arXiv:1804.04235) has a sum for each row and column of a matrix, some thousandths of a
byte for each number."""
_MUON = ("muon", "distmuon")


def _name(value: Any) -> str:
    """Short name of an optimizer: `adamw8bit` for `bitsandbytes.optim.AdamW8bit`."""
    return str(value).rpartition(".")[2].lower().replace("_", "")


def _kind(value: Any) -> dict[str, Any]:
    if _name(value) in _MUON:
        return {"optimizer.kind": "muon"}
    if value is not None and _name(value) not in (*_ADAMW, *_MOMENTS):
        raise ValueError(
            f"{value!r:.100} is not supported: optimizers are AdamW and Muon, and learning rates"
            " of others do not fit; write AdamW, and a learning rate for it (1e-4 is usual for"
            " LoRA, 1e-5 for all weights)"
        )
    return {} if value is None else {"optimizer.kind": "adamw"}


def _note(value: Any, *, scale: str, lr: str) -> str:
    """Text for the log about the optimizer `value`; empty for Adam and AdamW.

    For Muon it says how learning rates differ from those of a Muon that scales updates by `scale`,
    with `lr` as the remedy. For other optimizers it says how much memory AdamW takes instead.
    """
    if _name(value) in _MUON:
        return (
            "it updates whole matrices of attention and feed-forward, each linear by itself, by"
            " steps as large as AdamW's (0.2 sqrt(max(rows, columns)) times the learning rate). For"
            f" the steps of a Muon that scales by {scale}, {lr}"
        )
    theirs = _MOMENTS.get(_name(value))
    if theirs is None:
        return ""
    return (
        f"its two moments take 8 bytes for each trained number, {8 - theirs} more than what {value}"
        " keeps; --dry-run says how much memory that is. The statistics of"
        f" {value} would depend on the layout, and the results with them; optimizer.exp_avg_dtype"
        " and exp_avg_sq_dtype (bf16, fp16, fp8) take less memory, with Transformer Engine"
    )


def _of_torch(value: Any) -> str:
    return _note(
        value,
        scale="sqrt(max(1, rows / columns))",
        lr="divide optimizer.lr by 0.2 sqrt(model.hidden_size), and multiply"
        " optimizer.weight_decay by it",
    )


def _of_megatron(value: Any) -> str:
    return _note(
        value,
        scale="sqrt(max(rows, columns)) (muon_scale_mode=spectral)",
        lr="multiply optimizer.lr by 5, and divide optimizer.weight_decay by 5",
    )


OPTIMIZER = Foreign(reading=lambda value, _: _kind(value), instead=_of_torch)
"""Entry of the key that names an optimizer."""
OF_MEGATRON = Foreign(reading=lambda value, _: _kind(value), instead=_of_megatron)
"""Entry of the key that names an optimizer in files of Megatron-Core's stacks."""
OF_MUON = {
    "momentum": read_as("optimizer.muon_momentum"),
    "nesterov": read_as("optimizer.muon_nesterov"),
    "ns_steps": read_as("optimizer.muon_steps"),
    "ns_coefficients": unused_key("optimizer.muon_coefficients names some"),
    "adjust_lr_fn": unused_key(
        "match_rms_adamw is how updates are scaled here, so that optimizer.lr keeps its value then"
    ),
}
"""Entries for the options of torch's Muon, by name."""
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
"""Entries for the options of Megatron-Core's Muon, by name, but for `muon_momentum`, which has the
same name here."""
OPTION = unused_key("the optimizer has no such option; optimizer.* are its keys")
"""Entry for an option of an optimizer that is not supported."""
