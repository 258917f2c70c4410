"""What of a run its network refuses."""

from __future__ import annotations

from dit.config import RunConfig
from dit.config.checks import check
from dit.models.family import InputKind, NullInput
from dit.models.registry import family_of


def check_trainable(config: RunConfig) -> None:
    """Refuses networks that only generate.

    Raises:
        Problems: names the key.
    """
    check(
        (
            not family_of(config.model).tells_step_end(config.model),
            "model.use_meanflow=true: the network was distilled to predict the mean velocity of"
            " whole steps (mean flow), which no objective here teaches; train the network that it"
            " was distilled from, and generate with this one",
        )
    )


def check_objective_inputs(config: RunConfig) -> None:
    """Refuses what of the objective concerns inputs that the network or its samples do not have.

    Raises:
        Problems: names the keys.
    """
    wanted, family = config.objective, family_of(config.model)
    inputs = family.inputs(config.model)
    frames = [one for one in inputs if one.kind is InputKind.FRAMES]
    which = f"the network (model.family={family.name}, model.name={config.model.name})"
    if not frames:
        why = f"{which} takes no given frames; leave it out"
    else:
        why = f"{which} needs `{frames[0].name}` of every sample; leave it out"
    shown = frames or [one for one in inputs if one.kind is InputKind.FRAME_CHANNELS]
    optional = any(not one.required for one in shown)
    of_image = any(one.kind is InputKind.CHANNELS or one.null is NullInput.KEPT for one in inputs)
    p, counts = wanted.image_condition_probability, wanted.given_frames
    usual, told = family.guidance(config.model), wanted.guidance
    check(
        (
            usual is None or told is not None,
            f"objective.guidance=null: {which} is told a guidance scale; set it to {usual}, or to"
            " what the weights were distilled for",
        ),
        (
            usual is not None or told is None,
            f"objective.guidance={told}: {which} has no guidance embedding; leave it out",
        ),
        (p == 1 or optional, f"objective.image_condition_probability={p}: {why}"),
        (
            counts is None or (optional and bool(frames)),
            f"objective.given_frames={list(counts or ())}: {why}",
        ),
        (
            wanted.image_dropout == 0 or of_image,
            f"objective.image_dropout={wanted.image_dropout}: {which} takes no condition channels"
            " and no image rows; leave it out",
        ),
    )
