"""Keys that have an effect only with certain other settings: Muon's with `optimizer.kind=muon`.

Setting a key without effect is no error, because a file may serve several kinds of runs; the log
lists such keys when a run starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dit.config.choices import ObjectiveName
from dit.config.groups import RunGroups

SET = ...
"""The value in `NEEDS` that stands for any value but null."""

_EDM = {"objective.name": "edm"}
_FLOW = {"objective.name": "flow"}
_STRETCHED = "stretched_logit_normal"
_NORMAL = _FLOW | {"objective.density": ("logit_normal", _STRETCHED)}
_ONE_SHIFT = _FLOW | {"objective.time_shift_type": None}
_SHIFT_BY_TOKENS = _FLOW | {"objective.time_shift_type": ("exponential", "linear")}
_MUON = {"optimizer.kind": "muon"}
_FULL = {"model.recompute_granularity": "full"}
_SPARSE = {"model.sparse_attention": True}
_ADAPTERS = {"lora.rank": SET}  # or lora.init_from
_SIGMAS = {"objective.sampling_levels": ("karras", "karras_to_sigma_min")}  # or EDM
_DISTILL = {"distill.method": SET}
_OPD, _DMD = {"distill.method": "opd"}, {"distill.method": "dmd"}
_DECAY = {"scheduler.lr_decay_style": ("cosine", "linear")}

NEEDS: Mapping[str, Mapping[str, Any]] = {
    "model.cp_comm_type": {"model.context_parallel_size": range(2, 2**31)},
    "model.recompute_method": _FULL,
    "model.recompute_num_layers": _FULL,
    "model.fp8_recipe": {"model.fp8": SET},
    "model.route_rate": {"model.route_from": SET},
    "model.sparse_share": _SPARSE,
    "model.sparse_share_step": _SPARSE,
    "model.sparse_share_interval": _SPARSE,
    "model.reference_scale": {"model.reference_latents": range(1, 2**31)},
    "dataset.balance_packs": {"dataset.balance": ("flops", "flops_target")},
    "objective.loss_mean": {"objective.preference": None},
    "objective.huber_c": {"objective.loss": "huber"},
    "objective.dpo_beta": {"objective.preference": "dpo"},
    "objective.sigma_data": _EDM,
    "objective.p_mean": _EDM,
    "objective.p_std": _EDM,
    "objective.sigma_min": _SIGMAS,
    "objective.sigma_max": _SIGMAS,
    "objective.rho": _SIGMAS,
    "objective.density": _FLOW,
    "objective.logit_mean": _NORMAL,
    "objective.logit_std": _NORMAL,
    "objective.uniform_share": _FLOW | {"objective.density": _STRETCHED},
    "objective.mode_scale": _FLOW | {"objective.density": "mode"},
    "objective.flow_shift": _ONE_SHIFT,
    "objective.shift_base_tokens": _ONE_SHIFT,
    "objective.time_shift_type": _FLOW,
    "objective.base_shift": _SHIFT_BY_TOKENS,
    "objective.max_shift": _SHIFT_BY_TOKENS,
    "objective.base_image_seq_len": _SHIFT_BY_TOKENS,
    "objective.max_image_seq_len": _SHIFT_BY_TOKENS,
    "objective.timestep_scale": _FLOW,
    "objective.sampling_levels": _FLOW,
    "objective.sampling_timesteps": _FLOW,
    "objective.level_spacing": _FLOW,
    "objective.shift_terminal": _FLOW,
    "objective.weighting": _FLOW,
    "objective.prediction": _FLOW,
    "objective.level_range": _FLOW,
    "optimizer.min_lr": _DECAY,
    "optimizer.muon_momentum": _MUON,
    "optimizer.muon_nesterov": _MUON,
    "optimizer.muon_coefficients": _MUON,
    "optimizer.muon_steps": _MUON,
    "optimizer.muon_period": _MUON,
    "scheduler.lr_decay_iters": _DECAY,
    "ema.sigma_rel": {"ema.kind": "power"},
    "ema.decay": {"ema.kind": "constant"},
    "lora.alpha": _ADAPTERS,
    "lora.targets": _ADAPTERS | {"lora.init_from": None},
    "lora.dropout": _ADAPTERS,
    "lora.dtype": _ADAPTERS,
    "lora.ignore_text_encoder": _ADAPTERS,
    "lora.base": _ADAPTERS,
    "distill.steps": _DISTILL,
    "distill.teacher": _DISTILL,
    "distill.teacher_weights": _DISTILL | {"distill.teacher": SET},
    "distill.teacher_guidance": _DISTILL,
    "distill.teacher_steps": _OPD,
    **{
        f"distill.{key}": _DMD
        for key in (
            *("rollout", "student_sampler", "levels", "student_every", "critic_lr", "critic_load"),
            *("critic_lr_decay_style", "critic_lr_warmup_iters", "critic_ema_decay"),
        )
    },
    "distill.critic_alone": _DMD,
    "distill.gan_weight": _DMD,
    "checkpoint.finetune_weights": {"checkpoint.finetune": True},
    "logger.wandb_exp_name": {"logger.wandb_project": SET},
    "logger.wandb_entity": {"logger.wandb_project": SET},
}
"""Key -> the settings with which it has an effect; a tuple or range lists alternative values."""


def has(value: Any, wanted: Any) -> bool:
    """Whether `value` satisfies an entry `wanted` of `NEEDS`."""
    if wanted is SET:
        return value is not None
    return value in wanted if isinstance(wanted, tuple | range) else value == wanted


def missing(key: str, run: RunGroups) -> list[str]:
    """Settings that `run` lacks and without which `key` has no effect, each as KEY=VALUE.

    If any value but null serves, the text is the key alone.
    """
    # An objective of a user's own may read any of its keys, and EDM has Karras's levels alone.
    own = run.objective.name not in (*ObjectiveName,)
    given = {
        "objective.name": own,
        "objective.sampling_levels": run.objective.name != ObjectiveName.FLOW,
        "lora.rank": run.lora.enabled,
    }
    return [
        f"{other}{'' if wanted is SET else f'={_shown(wanted)}'}"
        for other, wanted in NEEDS.get(key, {}).items()
        if not (given.get(other) or has(_value(other, run), wanted))
    ]


def _value(key: str, run: RunGroups) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(run, group), name)


def _shown(wanted: Any) -> str:
    value = wanted[0] if isinstance(wanted, tuple | range) else wanted
    return "null" if value is None else str(value).lower()
