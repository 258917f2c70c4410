"""The other components of a pipeline folder, with which a Diffusers pipeline can run the export.

Such an export has model_index.json, `transformer`, `scheduler` with the noise range of the run, and
tokenizer, text encoder and VAE copied from another pipeline. Wan 2.2 has two networks: the run's is
written, and the other one is copied. If the pipeline itself decides noise levels and
preconditioning, the scheduler is copied, too, with the run's settings in it.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dit.config import FlowPrediction, ModelConfig, ObjectiveConfig, RunConfig
from dit.convert.diffusers_checkpoint import (
    CONFIG,
    PIPELINE_INDEX,
    SCHEDULER_CONFIG,
    SECOND,
    WEIGHTS,
    level_range,
    pipeline_index,
    read_json,
    write_json,
)
from dit.convert.errors import ConvertError, listed
from dit.models.registry import diffusers_form
from dit.objectives.registry import REGISTRY
from dit.system_errors import explained

TRANSFORMER, SCHEDULER = "transformer", "scheduler"
_TOLD = "quantization_config"
_INSTALLED = "safety_checker"  # this component is an installed package, not a folder


def check_pipeline(pipeline: Path, config: RunConfig) -> None:
    """Checks that the pipeline would feed the network the inputs it was trained with.

    Raises:
        ConvertError: a component does not fit, or its folder is missing.
    """
    known = diffusers_form(config.model).pipelines
    kind = _pipeline_class(pipeline)
    if kind not in known:
        raise ConvertError(
            f"--pipeline-from {pipeline} is of class {kind}, which does not match this network's"
            f" training; give a pipeline of class {listed(known)}"
        )
    if lost := [name for name in _components(pipeline, config) if not (pipeline / name).is_dir()]:
        raise ConvertError(f"--pipeline-from {pipeline} has no {listed(lost)}; download all of it")
    if narrow := [name for name in _components(pipeline, config) if _needs_scales(pipeline / name)]:
        raise ConvertError(
            f"--pipeline-from {pipeline} has 8-bit floats with scales in {listed(narrow)}, which"
            " Diffusers does not read: give a pipeline in bfloat16, or export without it"
        )
    if problems := _misfits(pipeline, kind, config.model, config.objective):
        raise ConvertError(
            f"--pipeline-from {pipeline} does not fit the run: {'; '.join(problems)}. Export"
            " without it, and run transformer and scheduler in your own loop"
        )


def _pipeline_class(pipeline: Path) -> str:
    """Class name of the pipeline in the folder `pipeline`, from its index.

    Raises:
        ConvertError: the folder holds no pipeline.
    """
    index = pipeline_index(pipeline)
    if not index.is_file():
        raise ConvertError(
            f"--pipeline-from {pipeline} has no {PIPELINE_INDEX}; give the folder of a pipeline"
        )
    return str(read_json(index).get("_class_name"))


def keeps_scheduler(pipeline: Path | None, model: ModelConfig) -> bool:
    """Whether an export keeps the pipeline's own scheduler, with the run's noise levels.

    Raises:
        ConvertError: the folder holds no pipeline.
    """
    if pipeline is None:
        return False
    known = diffusers_form(model).pipelines.get(_pipeline_class(pipeline))
    return known is not None and bool(known.objective)


def network_folder(pipeline: Path, objective: ObjectiveConfig) -> str:
    """Folder of a run's network in the pipeline; of two networks, that for the run's levels."""
    return _networks(pipeline).get(objective.level_range, TRANSFORMER)


def _networks(pipeline: Path) -> dict[tuple[float, float] | None, str]:
    """Lowest and highest noise level (None: all levels) -> folder of the network for them."""
    place = pipeline_index(pipeline)
    index = read_json(place)
    parts = ((SECOND, True), (TRANSFORMER, False))  # the last one counts where there is one alone
    return {level_range(index, place, second=second): name for name, second in parts}


def _components(pipeline: Path, config: RunConfig) -> list[str]:
    """Names of the components in the pipeline's index that are copied, not written."""
    own = {network_folder(pipeline, config.objective), _INSTALLED}
    if (second := diffusers_form(config.model).written_companion(config.model)) is not None:
        own.add(second.folder)
    if not keeps_scheduler(pipeline, config.model):
        own.add(SCHEDULER)
    index = read_json(pipeline_index(pipeline))
    # Library and class; other lists are numbers, such as those of layers.
    pairs = {name: what for name, what in index.items() if isinstance(what, list)}
    present = [name for name, what in pairs.items() if what and isinstance(what[0], str)]
    return [name for name in present if name not in own]


def _needs_scales(part: Path) -> bool:
    """Whether weights in the folder `part` have scales that config.json's quantizer does not apply.

    Raises:
        ConvertError: a weight file is damaged.
    """
    for file in part.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy") as opened:
                scaled = any(name.endswith(".weight_scale") for name in opened.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConvertError(
                f"{file} is damaged ({explained(error)}); download it again"
            ) from error
        # Transformers has a quantizer where config.json names one; Diffusers' networks have none.
        read = not file.name.startswith(WEIGHTS) and _setting(part / CONFIG, _TOLD)
        if scaled and not read:
            return True
    return False


def _misfits(
    pipeline: Path, kind: str, model: ModelConfig, objective: ObjectiveConfig
) -> list[str]:
    m, runs = model, diffusers_form(model).pipelines[kind]
    latent = _latent_channels(pipeline / "vae" / CONFIG)
    text = _setting(pipeline / "text_encoder" / CONFIG, "d_model")
    rules = [
        (
            REGISTRY[objective.name].scheduler is REGISTRY[runs.samples].scheduler,
            f"objective.name={objective.name}, and {kind} samples {runs.samples.upper()}",
        ),
        (
            objective.prediction is FlowPrediction.VELOCITY,
            f"objective.prediction={objective.prediction}, and {kind} takes velocities",
        ),
        # The keys of `objective` that the pipeline's loop fixes; its name has been compared.
        *(
            (
                getattr(objective, key) == wanted,
                f"objective.{key}={getattr(objective, key)}, and {kind} has {wanted}",
            )
            for key, wanted in runs.fixed(_content(pipeline / SCHEDULER / SCHEDULER_CONFIG)).items()
            if key != "name"
        ),
        (
            objective.level_range in _networks(pipeline),
            f"objective.level_range={_shown(objective.level_range)}, and its networks"
            f" are for {' and '.join(map(_shown, _networks(pipeline)))}",
        ),
        *((False, message) for message in runs.misfits(m)),
        (
            latent in (None, m.in_channels),
            f"model.in_channels={m.in_channels}, and its VAE has {latent}",
        ),
        (
            text in (None, m.crossattn_emb_size),
            f"model.crossattn_emb_size={m.crossattn_emb_size}, and its text encoder has {text}",
        ),
    ]
    return [message for holds, message in rules if not holds]


def _shown(levels: tuple[float, float] | None) -> str:
    return "null" if levels is None else f"[{levels[0]:g}, {levels[1]:g}]"


def _content(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _setting(file: Path, key: str) -> Any:
    return _content(file).get(key)


def _latent_channels(file: Path) -> int | None:
    """Channels of the latents of the VAE with the config.json `file`; None if it states none.

    If the VAE has a batch norm over patches of cells, they are the channels of a whole patch.
    """
    channels = _setting(file, "latent_channels")
    cells = _setting(file, "patch_size") if _setting(file, "batch_norm_eps") else ()
    return channels and channels * math.prod(cells)


def copy_components(
    pipeline: Path, folder: Path, config: RunConfig, *, scheduler: dict[str, Any] | None
) -> None:
    """Copies the index and all components of a pipeline that the export does not write itself.

    The run's network is not copied, except for Python files in its folder. The scheduler is copied
    only if `keeps_scheduler` says so; then the run's settings are written into the copy. The index
    gets the class of `scheduler`, the scheduler_config.json that the export writes, because
    Diffusers opens the file with the class in the index.
    """
    for name in _components(pipeline, config):
        shutil.copytree(pipeline / name, folder / name)
    known = diffusers_form(config.model).pipelines[_pipeline_class(pipeline)]
    if keys := known.scheduler(config.objective):
        own = folder / SCHEDULER / SCHEDULER_CONFIG
        write_json(own, read_json(own) | keys)
    place = pipeline_index(pipeline)
    shutil.copyfile(place, folder / place.name)
    own = network_folder(pipeline, config.objective)
    for code in (pipeline / own).glob("*.py"):  # of classes that Diffusers has not
        (folder / own).mkdir(exist_ok=True)
        shutil.copyfile(code, folder / own / code.name)
    index = read_json(place)
    if scheduler is not None and (named := ["diffusers", scheduler["_class_name"]]) != index.get(
        SCHEDULER
    ):
        write_json(folder / place.name, index | {SCHEDULER: named})
