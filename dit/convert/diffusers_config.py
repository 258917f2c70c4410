"""config.json and scheduler_config.json of Diffusers <-> our configuration.

What one side has and the other cannot express is an error that names it. What Diffusers has no
place for and does not need is kept in config.json under a private key, which it ignores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dit.config import (
    CUSTOM_SIZE,
    ExtraPosition,
    ModelConfig,
    ObjectiveConfig,
    Precision,
    RunConfig,
)
from dit.config.loading import load_config
from dit.convert.diffusers_json import (
    OUR_KEY,
    CosmosTransformer,
    OurSettings,
    PrivateKeys,
    checked_json,
)
from dit.convert.errors import ConvertError, listed
from dit.objectives.diffusers_schedulers import SchedulerFile
from dit.objectives.registry import REGISTRY

CLASS = "CosmosTransformer3DModel"
COSMOS_TEXT_TOKENS = 512
"""What the published weights attend to: the caption, and zeros up to this many tokens."""
_BASE_FPS = 24.0  # fixed in Diffusers


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
    private = checked_json(PrivateKeys, content, place=place)
    unused = private.use_default_values
    given = {k: v for k, v in content.items() if not k.startswith("_") and k not in unused}
    t = checked_json(CosmosTransformer, given, place=place)
    if wrong := _foreign(t):
        raise ConvertError(f"{place} describes a model that cannot be imported: {'; '.join(wrong)}")
    ours = private.ours or OurSettings(text_pad_to=text_pad_to, max_size=t.max_size)
    projected = t.use_crossattn_projection
    try:
        return ModelConfig(
            name=CUSTOM_SIZE,
            num_layers=t.num_layers,
            hidden_size=t.num_attention_heads * t.attention_head_dim,
            num_attention_heads=t.num_attention_heads,
            mlp_ratio=t.mlp_ratio,
            adaln_lora_dim=t.adaln_lora_dim,
            in_channels=t.in_channels,
            patch_temporal=t.patch_size[0],
            patch_spatial=t.patch_size[1],
            crossattn_emb_size=t.crossattn_proj_in_channels if projected else t.text_embed_dim,
            crossattn_proj_size=t.text_embed_dim if projected else None,
            text_pad_to=ours.text_pad_to,
            rope_scale=t.rope_scale,
            extra_pos_embed=ExtraPosition(t.extra_pos_embed_type or "none"),
            max_size=ours.max_size,
            concat_padding_mask=t.concat_padding_mask,
            precision=precision,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ConvertError(f"{place} describes no model that can be trained: {error}") from error


def _foreign(t: CosmosTransformer) -> list[str]:
    """What of a config.json our model has no counterpart for."""
    unknown = t.model_extra or {}
    rules = [
        (not unknown, f"unknown keys {listed(unknown)}"),
        (
            t.in_channels == t.out_channels,
            f"in_channels={t.in_channels} and out_channels={t.out_channels} differ"
            " (a model that is shown frames, such as video2world)",
        ),
        (
            t.patch_size[1] == t.patch_size[2],
            f"patch_size={list(t.patch_size)} is not square",
        ),
        (
            t.extra_pos_embed_type in (None, "learnable"),
            f"extra_pos_embed_type={t.extra_pos_embed_type!r}",
        ),
        (
            not t.use_crossattn_projection or t.encoder_hidden_states_channels == t.text_embed_dim,
            f"encoder_hidden_states_channels={t.encoder_hidden_states_channels} is not"
            f" text_embed_dim={t.text_embed_dim}",
        ),
        (not t.img_context_dim_in, f"img_context_dim_in={t.img_context_dim_in}"),
        (
            t.controlnet_block_every_n is None,
            f"controlnet_block_every_n={t.controlnet_block_every_n}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def diffusers_transformer_config(config: RunConfig) -> dict[str, Any]:
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
    scheduler = REGISTRY[objective.name].scheduler
    remedy = "--no-scheduler exports the weights alone"
    if scheduler is None:
        raise ConvertError(
            f"objective.name={objective.name}: this objective has no Diffusers scheduler; {remedy}"
        )
    if option := scheduler.inexpressible(objective):
        raise ConvertError(f"{option}: {scheduler.class_names[0]} cannot express it; {remedy}")
    return scheduler.content(objective)


@dataclass(frozen=True, slots=True)
class FoundObjective:
    """What a scheduler says of training."""

    objective: ObjectiveConfig
    note: str


def objective_config(
    content: dict[str, Any] | None, *, place: object, given: Sequence[str] = ()
) -> FoundObjective:
    """The objective of a scheduler_config.json, with the settings `given` by the user on top.

    The default objective where there is no scheduler. `given` are words such as
    `objective.name=flow`; with that one any scheduler will do.

    Raises:
        ConvertError: the scheduler does not say what the network was trained for, or asks for what
            no objective here is; names the file and the remedy.
        ConfigError: `given` is not understood.
    """
    if other := [word for word in given if not word.lstrip("+-~").startswith("objective.")]:
        raise ConvertError(f"{other[0]!r} is not understood; only objective.KEY=VALUE can be set")
    told = any(word.lstrip("+-").startswith("objective.name") for word in given)
    if content is None:
        found = FoundObjective(
            ObjectiveConfig(),
            "the default, since there is no scheduler_config.json; set objective.* to what they"
            " were trained with",
        )
    else:
        found = _of_scheduler(content, place, told=told)
    if not given:
        return found
    config = load_config(RunConfig(objective=found.objective), overrides=given)
    return FoundObjective(config.objective, f"with {' '.join(given)}, as given")


def _of_scheduler(content: dict[str, Any], place: object, *, told: bool) -> FoundObjective:
    """What a scheduler says; the default where it does not and the user has `told`."""
    name, kind = content.get("_class_name"), _scheduler_of(content)
    known = " or ".join(f"objective.name={one}" for one in REGISTRY)
    ask = f"say what the weights were trained for: {known}"
    if kind is not None:
        file = checked_json(kind, content, place=place)
        key = file.undecided()
        if key is None:
            return FoundObjective(_objective(file, place), f"of {name}")
        ask = f"its {key} leaves the levels to a pipeline; {ask}"
    if not told:
        raise ConvertError(
            f"{place} is of class {name!r}, which does not tell the objective; {ask}"
        )
    return FoundObjective(ObjectiveConfig(), "")


def _scheduler_of(content: dict[str, Any]) -> type[SchedulerFile] | None:
    """What reads a scheduler_config.json of this class, or None."""
    kinds = [parts.scheduler for parts in REGISTRY.values() if parts.scheduler]
    return next((kind for kind in kinds if content.get("_class_name") in kind.class_names), None)


def _objective(file: SchedulerFile, place: object) -> ObjectiveConfig:
    try:
        return file.objective()
    except ValueError as error:
        raise ConvertError(f"{place} describes no objective: {error}") from error
