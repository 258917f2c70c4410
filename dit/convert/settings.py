"""config.json and scheduler_config.json of Diffusers <-> our configuration.

What one side has and the other cannot express is an error that names it. What Diffusers has no
place for and does not need is kept in config.json under a private key, which it ignores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dit.config import (
    CUSTOM_SIZE,
    ExtraPosition,
    ModelConfig,
    ObjectiveConfig,
    ObjectiveName,
    Precision,
    RunConfig,
)
from dit.convert.errors import ConvertError, listed

CLASS = "CosmosTransformer3DModel"
EDM_SCHEDULER, FLOW_SCHEDULER = "EDMEulerScheduler", "FlowMatchEulerDiscreteScheduler"
COSMOS_TEXT_TOKENS = 512
"""What the published weights attend to: the caption, and zeros up to this many tokens."""
OUR_KEY = "_megatron_dit"
_BASE_FPS = 24.0  # fixed in Diffusers
_FLOW_STEPS = 1000  # num_train_timesteps of FlowMatchEulerDiscreteScheduler

# Diffusers' own defaults, for what a config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "num_layers": 28,
    "mlp_ratio": 4.0,
    "text_embed_dim": 1024,
    "adaln_lora_dim": 256,
    "max_size": (128, 240, 240),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
    "concat_padding_mask": True,
    "extra_pos_embed_type": "learnable",
    "use_crossattn_projection": False,
    "crossattn_proj_in_channels": 1024,
    "encoder_hidden_states_channels": 1024,
    "controlnet_block_every_n": None,
    "img_context_dim_in": None,
    "img_context_num_tokens": 256,
    "img_context_dim_out": 2048,
}


def model_config(
    content: dict[str, Any], *, precision: Precision, text_pad_to: int | None, place: object
) -> ModelConfig:
    """Our model of a config.json; `text_pad_to` is for weights that were not exported by us.

    Raises:
        ConvertError: it is of another class, or has what our model has not; lists everything.
    """
    if content.get("_class_name") != CLASS:
        raise ConvertError(
            f"{place} is of class {content.get('_class_name')!r}; only {CLASS} can be imported"
        )
    unused = content.get("_use_default_values", [])
    given = {k: v for k, v in content.items() if k[0] != "_" and k not in unused}
    if wrong := _foreign(_DEFAULTS | given, unknown=given.keys() - _DEFAULTS.keys()):
        raise ConvertError(f"{place} describes a model that cannot be imported: {'; '.join(wrong)}")
    t = _DEFAULTS | given
    ours: dict[str, Any] = {"text_pad_to": text_pad_to, "max_size": t["max_size"]} | content.get(
        OUR_KEY, {}
    )
    projected = bool(t["use_crossattn_projection"])
    size: Any = tuple(ours["max_size"])
    scale: Any = tuple(map(float, t["rope_scale"]))
    try:
        return ModelConfig(
            name=CUSTOM_SIZE,
            num_layers=t["num_layers"],
            hidden_size=t["num_attention_heads"] * t["attention_head_dim"],
            num_attention_heads=t["num_attention_heads"],
            mlp_ratio=float(t["mlp_ratio"]),
            adaln_lora_dim=t["adaln_lora_dim"],
            in_channels=t["in_channels"],
            patch_temporal=t["patch_size"][0],
            patch_spatial=t["patch_size"][1],
            crossattn_emb_size=t["crossattn_proj_in_channels" if projected else "text_embed_dim"],
            crossattn_proj_size=t["text_embed_dim"] if projected else None,
            text_pad_to=ours["text_pad_to"],
            rope_scale=scale,
            extra_pos_embed=ExtraPosition(t["extra_pos_embed_type"] or "none"),
            max_size=size,
            concat_padding_mask=bool(t["concat_padding_mask"]),
            precision=precision,
        )
    except (TypeError, ValueError) as error:
        raise ConvertError(f"{place} describes no model that can be trained: {error}") from error


def _foreign(t: dict[str, Any], *, unknown: set[str]) -> list[str]:
    """What of a config.json our model has no counterpart for."""
    patch, projected = t["patch_size"], t["use_crossattn_projection"]
    rules = [
        (not unknown, f"unknown keys {listed(unknown)}"),
        (
            t["in_channels"] == t["out_channels"],
            f"in_channels={t['in_channels']} and out_channels={t['out_channels']} differ"
            " (a model that is shown frames, such as video2world)",
        ),
        (len(patch) == 3 and patch[1] == patch[2], f"patch_size={patch} is not square"),
        (
            t["extra_pos_embed_type"] in (None, "learnable"),
            f"extra_pos_embed_type={t['extra_pos_embed_type']!r}",
        ),
        (
            not projected or t["encoder_hidden_states_channels"] == t["text_embed_dim"],
            f"encoder_hidden_states_channels={t['encoder_hidden_states_channels']} is not"
            f" text_embed_dim={t['text_embed_dim']}",
        ),
        (not t["img_context_dim_in"], f"img_context_dim_in={t['img_context_dim_in']}"),
        (
            t["controlnet_block_every_n"] is None,
            f"controlnet_block_every_n={t['controlnet_block_every_n']}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def transformer_config(config: RunConfig) -> dict[str, Any]:
    """config.json of a run's model.

    Raises:
        ConvertError: Diffusers cannot express the model.
    """
    m = config.model
    if m.base_fps != _BASE_FPS:
        raise ConvertError(
            f"model.base_fps={m.base_fps:g} cannot be exported: Diffusers' {CLASS} has"
            f" {_BASE_FPS:g} built in"
        )
    learnable = m.extra_pos_embed is ExtraPosition.LEARNABLE
    patch = (m.patch_temporal, m.patch_spatial, m.patch_spatial)
    projected = {
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": m.crossattn_emb_size,
        "encoder_hidden_states_channels": m.text_width,
    }
    return {
        "_class_name": CLASS,
        "_diffusers_version": "0.35.0",
        OUR_KEY: {"text_pad_to": m.text_pad_to, "max_size": m.max_size},
        "in_channels": m.in_channels,
        "out_channels": m.in_channels,
        "num_attention_heads": m.num_attention_heads,
        "attention_head_dim": m.hidden_size // m.num_attention_heads,
        "num_layers": m.num_layers,
        "mlp_ratio": m.mlp_ratio,
        "text_embed_dim": m.text_width,
        "adaln_lora_dim": m.adaln_lora_dim,
        "max_size": m.max_size if learnable else _covering(config, patch),
        "patch_size": patch,
        "rope_scale": m.rope_scale,
        "concat_padding_mask": m.concat_padding_mask,
        "extra_pos_embed_type": "learnable" if learnable else None,
        # Older versions of Diffusers do not know these.
        **(projected if m.crossattn_proj_size else {}),
    }


def _covering(config: RunConfig, patch: tuple[int, ...]) -> tuple[int, ...]:
    """A `max_size` that covers every grid trained on.

    Diffusers looks rotary positions up in a table of the longest side; ours are computed. No side
    was longer than a pack.
    """
    d, size = config.dataset, config.model.max_size
    if not (d.path or d.blend or d.mock):
        return size
    return tuple(max(s, d.task_encoder_seq_length * p) for s, p in zip(size, patch, strict=True))


def scheduler_config(objective: ObjectiveConfig) -> dict[str, Any]:
    """scheduler_config.json with the noise range of a run, and the levels that our samplers use.

    Raises:
        ConvertError: Diffusers' schedulers cannot express the objective.
    """
    o = objective
    if o.name is ObjectiveName.EDM:
        return {
            "_class_name": EDM_SCHEDULER,
            "_diffusers_version": "0.35.0",
            "sigma_min": o.sigma_min,
            "sigma_max": o.sigma_max,
            "sigma_data": o.sigma_data,
            "sigma_schedule": "karras",
            "num_train_timesteps": 1000,
            "prediction_type": "epsilon",
            "rho": o.rho,
            "final_sigmas_type": "zero",
        }
    remedy = f"{FLOW_SCHEDULER} cannot express it; --no-scheduler exports the weights alone"
    if o.timestep_scale != _FLOW_STEPS:
        raise ConvertError(f"objective.timestep_scale={o.timestep_scale:g}: {remedy}")
    if o.shift_base_tokens is not None:
        raise ConvertError(f"objective.shift_base_tokens={o.shift_base_tokens}: {remedy}")
    return {
        "_class_name": FLOW_SCHEDULER,
        "_diffusers_version": "0.35.0",
        "num_train_timesteps": _FLOW_STEPS,
        "shift": o.flow_shift,
    }


@dataclass(frozen=True, slots=True)
class FoundObjective:
    """What a scheduler says of training."""

    objective: ObjectiveConfig
    note: str


def objective_config(content: dict[str, Any] | None) -> FoundObjective:
    """The objective of a scheduler_config.json; the default one where it does not tell.

    Raises:
        ConvertError: the network was trained to give what no objective here asks for.
    """
    c = content or {}
    name = c.get("_class_name")
    if name == EDM_SCHEDULER:
        if c.get("prediction_type", "epsilon") != "epsilon":
            raise ConvertError(f"the scheduler's prediction_type={c['prediction_type']!r}")
        names = ("sigma_min", "sigma_max", "sigma_data", "rho")
        known: dict[str, Any] = {key: float(c[key]) for key in names if key in c}
        return FoundObjective(ObjectiveConfig(name=ObjectiveName.EDM, **known), f"of {name}")
    if name == FLOW_SCHEDULER and not _own_levels(c):
        steps = float(c.get("num_train_timesteps", _FLOW_STEPS))
        flow = ObjectiveConfig(
            name=ObjectiveName.FLOW, flow_shift=float(c.get("shift", 1.0)), timestep_scale=steps
        )
        return FoundObjective(flow, f"of {name}")
    said = "there is no scheduler_config.json" if name is None else f"{name} does not tell"
    return FoundObjective(
        ObjectiveConfig(),
        f"the default, since {said}; set objective.* to what they were trained with",
    )


def _own_levels(c: dict[str, Any]) -> bool:
    """Whether a pipeline computes levels and preconditioning itself (Cosmos 2), or shifts them."""
    return any(c.get(key) for key in ("use_karras_sigmas", "use_dynamic_shifting"))
