"""Keys of diffusion-pipe's main TOML file; data_prep reads its dataset file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dit.foreign.entry import (
    CHOOSE_TARGETS,
    PACKS,
    STEPS,
    Foreign,
    adapter_dtype,
    betas,
    flow,
    going_on,
    is_number,
    network_of,
    probability,
    read_as,
    read_by,
    read_together,
    recompute,
    unused_key,
)
from dit.foreign.optimizers import OPTIMIZER, OPTION
from dit.models.registry import FAMILIES, family_named

_PACKING = "data are packed before training, by `python -m data_prep`"
_COUNTED = "it counts steps"
_MERGE = "merge them into the weights that you start from: `python -m dit.convert export --merged`"
_HUBER = "objective.loss=huber is the pseudo-Huber loss, sqrt(e² + c²) - c, with objective.huber_c"


_NAMES = {
    "cosmos": "dit",
    "cosmos_predict2": "dit",
    "hunyuan-video": "hunyuan_video",
    "ltx-video": "ltx",
    "lumina_2": "lumina2",
    "qwen_image_plus": "qwen_image",
    "z_image": "zimage",
}
"""diffusion-pipe's name of a network -> family, for names that differ."""
_FAMILIES = {name: name for name in FAMILIES} | _NAMES


def _dataset_file(value: Any) -> dict[str, Any]:
    if not str(value).endswith(".toml"):
        raise ValueError(
            f"{value!r:.100} is not a .toml file, and dataset is a group of keys here; set a key"
            " such as dataset.path"
        )
    return {}


def _precision(value: Any) -> dict[str, Any]:
    words = {"bfloat16": "bf16", "float32": "fp32"}
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{value!r:.100} is not supported; give bfloat16 or float32")
    return {"model.precision": words[value]}


def _base_type(value: Any) -> dict[str, Any]:
    """`lora.base_dtype` for diffusion-pipe's dtype of the frozen weights under adapters.

    No key for a dtype that is not 8 bits wide: `model.precision` decides.
    """
    if value in ("float8", "float8_e4m3fn"):
        return {"lora.base_dtype": "float8_e4m3"}
    if str(value).startswith("float8"):
        raise ValueError(f"{value!r:.100} is not supported; give float8_e4m3fn, or leave it out")
    return {}  # model.precision decides


_PLACES = unused_key(
    "checkpoint.load_hf names the Diffusers folder of the weights, `python -m data_prep"
    " --model_name` that of the encoders"
)
_BASE_TYPE = read_by(_base_type, "each row has a factor, which a plain cast to 8 bits lacks")


def _first_frame(value: Any) -> dict[str, Any]:
    """`objective.given_frames` for the probability that LTX-Video keeps the first frame clean."""
    (given,) = probability("objective.given_frames")(value).values()
    return {"objective.given_frames": [1 - given, given]}


def _adapter(value: Any) -> dict[str, Any]:
    """`lora.targets` for diffusion-pipe's adapters, which adapt every linear of the blocks."""
    if value != "lora":
        raise ValueError(
            f"{value!r:.100} is not supported; give type = 'lora', the only kind of adapters"
        )
    return {"lora.targets": ["*blocks.*"]}


def _constant(value: Any) -> dict[str, Any]:
    return {"optimizer.lr": value, "scheduler.lr_decay_style": "constant"}


def _huber(value: Any) -> dict[str, Any]:
    return {"objective.loss": "huber", "objective.huber_c": value}


def _number(values: Mapping[str, Any], key: str, usual: float) -> float:
    """The number of `key`, or `usual` if there is none."""
    value = values.get(key, usual)
    return value if is_number(value) else usual


def _range(values: Mapping[str, Any]) -> dict[str, Any]:
    """`level_range` from diffusion-pipe's limits: both restrict levels after their shift."""
    low, high = _number(values, "model.min_t", 0), _number(values, "model.max_t", 1)
    whole = low == 0 and high == 1
    return {
        "objective.name": "flow",
        "objective.level_range": None if whole else [low, high],
    }


def _shift(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for the shift of noise levels.

    A constant `shift` overrides a shift by the number of tokens (`flux_shift`, `lumina_shift`); 0
    stands for no constant.
    """
    if constant := values.get("model.shift"):
        keys = {"time_shift_type": None, "flow_shift": constant}
    else:
        if not any(values.get(f"model.{name}") is True for name in ("flux_shift", "lumina_shift")):
            return {}
        # Whatever the network, get_lin_function of diffusion-pipe has these numbers, and counts
        # patches of 2 x 2 cells.
        name = _FAMILIES.get(str(values.get("model.type")))
        patch = 4 if name and family_named(name).default().patch_spatial == 1 else 1
        line = {"base_shift": 0.5, "max_shift": 1.15}
        line |= {"base_image_seq_len": 256 * patch, "max_image_seq_len": 4096 * patch}
        keys = {"time_shift_type": "exponential", "flow_shift": 1.0, **line}
    keys |= {"name": "flow", "shift_base_tokens": None}
    return {f"objective.{key}": one for key, one in keys.items()}


def _guided(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for diffusion-pipe's `cfg` w, whose loss is that of `objective.cfg_target` over w².

    The clipping norm is multiplied by w² to have the same effect.
    """
    w, clip = (_number(values, key, 1) for key in ("model.cfg", "gradient_clipping"))
    keys: dict[str, Any] = {"optimizer.clip_grad": clip * w**2}
    return keys if w == 1 else keys | {"objective.cfg_target": w}


def _mode(value: Any) -> dict[str, Any]:
    return {"logger.wandb_mode": "online" if value is True else "disabled"}


def _named(key: str) -> Foreign:
    """Entry that reads an optional text as `key`; an empty text sets nothing."""
    return read_by(lambda value: {} if value == "" else {key: value})


_NUMBER: dict[str, Any] = {"fits": is_number, "expected": "a number"}
_LEVEL: dict[str, Any] = _NUMBER | {"expected": "a number from 0 to 1"}
_FLAG: dict[str, Any] = {
    "fits": lambda value: isinstance(value, bool),
    "expected": "true or false",
}

DIFFUSION_PIPE: dict[str, Foreign] = {
    "output_dir": read_as("checkpoint.save"),
    "dataset": read_by(
        _dataset_file,
        "pack it: `python -m data_prep image --dataset_config FILE --output_dir NEW`, then"
        " set dataset.path=NEW",
    ),
    "eval_datasets": unused_key("pack each with data_prep, and name it in validation.sets"),
    "epochs": unused_key(STEPS),
    "max_steps": read_as("train.train_iters"),
    "pipeline_stages": read_as("model.pipeline_model_parallel_size"),
    "gradient_accumulation_steps": unused_key(PACKS),
    "gradient_clipping": read_together(_guided, **_NUMBER),
    "warmup_steps": read_as("scheduler.lr_warmup_iters"),
    "force_constant_lr": read_by(_constant),
    "lr_scheduler": read_as("scheduler.lr_decay_style"),
    "pseudo_huber_c": read_by(_huber),
    "huber_delta": unused_key(_HUBER, None),
    "smooth_l1_beta": unused_key(_HUBER, None),
    "blocks_to_swap": read_as("model.blocks_to_swap"),
    "disable_block_swap_for_eval": unused_key("blocks take turns in validation as in training"),
    "eval_every_n_steps": read_as("train.eval_interval"),
    "eval_every_n_epochs": unused_key(f"train.eval_interval decides; {_COUNTED}"),
    "eval_every_n_examples": unused_key(f"train.eval_interval decides; {_COUNTED}"),
    "eval_before_first_step": read_as("validation.at_start"),
    "eval_gradient_accumulation_steps": unused_key("train.eval_iters packs make a validation"),
    "*micro_batch_size_per_gpu": unused_key(PACKS),
    "save_every_n_steps": read_as("checkpoint.save_interval"),
    "save_every_n_epochs": unused_key(f"checkpoint.save_interval decides; {_COUNTED}"),
    "save_every_n_examples": unused_key(f"checkpoint.save_interval decides; {_COUNTED}"),
    "checkpoint_every_n_*": unused_key(f"checkpoint.save_interval decides; {_COUNTED}"),
    "activation_checkpointing": read_by(recompute),
    "reentrant_activation_checkpointing": unused_key("model.recompute_granularity decides"),
    "partition_method": unused_key("each stage has as many layers as the others"),
    "partition_split": unused_key("each stage has as many layers as the others"),
    "save_dtype": unused_key("`python -m dit.convert export --dtype` decides"),
    "upload_hf_from_epoch": unused_key("nothing is uploaded"),
    "huggingface_repo": unused_key("nothing is uploaded"),
    "caching_batch_size": unused_key(f"{_PACKING}: --batch_size"),
    "map_num_proc": unused_key(f"{_PACKING}: --num_workers"),
    "video_clip_mode": unused_key(f"{_PACKING}: --window"),
    "compile": read_as("model.compile"),
    "steps_per_print": read_as("logger.log_interval"),
    "x_axis_examples": unused_key("charts count steps"),
    "resume_from_checkpoint": read_by(going_on, "the same command goes on where it stopped"),
    "deepspeed": unused_key("Megatron-Core trains"),
    "cache_only": unused_key(_PACKING, None, False),
    "regenerate_cache": unused_key(_PACKING),
    "trust_cache": unused_key(_PACKING),
    "model.dtype": read_by(_precision),
    "model.timestep_sample_method": flow("objective.density"),
    "model.sigmoid_scale": flow("objective.logit_std"),
    "model.shift": read_together(_shift),
    "model.flux_shift": read_together(_shift, **_FLAG),
    "model.lumina_shift": read_together(_shift, **_FLAG),
    "model.type": network_of(_FAMILIES),
    "model.*_path": _PLACES,
    "model.diffusion_model": _PLACES,
    "model.vae": _PLACES,
    "model.text_encoders": _PLACES,
    "model.transformer_dtype": _BASE_TYPE,
    "model.diffusion_model_dtype": _BASE_TYPE,
    "model.*_dtype": unused_key("model.precision decides"),
    "model.first_frame_conditioning_p": read_by(_first_frame),
    "model.cfg": read_together(
        _guided,
        "samples whose caption is dropped keep their target here, which diffusion-pipe"
        " scales as well",
        **_NUMBER,
    ),
    "model.merge_adapters": unused_key(_MERGE, [], None),
    "model.min_t": read_together(_range, **_LEVEL),
    "model.max_t": read_together(_range, **_LEVEL),
    "adapter.type": read_by(_adapter),
    "adapter.rank": read_as("lora.rank"),
    "adapter.alpha": unused_key(
        "diffusion-pipe has alpha = rank, and refuses the key; lora.alpha sets another",
        None,
    ),
    "adapter.dropout": read_as("lora.dropout"),
    "adapter.dtype": read_by(adapter_dtype),
    "adapter.init_from_existing": _named("lora.init_from"),
    "adapter.exclude_modules": unused_key(CHOOSE_TARGETS, [], None),
    "adapter.fuse_adapters": unused_key(_MERGE, [], None),
    "adapter": unused_key("lora.rank turns adapters on", None),
    "adapter.*": unused_key("lora.* decides"),
    "optimizer.type": OPTIMIZER,
    "optimizer.betas": read_by(betas),
    "optimizer.eps": read_as("optimizer.adam_eps"),
    "optimizer.stabilize": OPTION,
    "monitoring.enable_wandb": read_by(_mode),
    "monitoring.wandb_tracker_name": _named("logger.wandb_project"),
    "monitoring.wandb_run_name": _named("logger.wandb_exp_name"),
    "monitoring.wandb_api_key": unused_key("`wandb login` or WANDB_API_KEY holds it, and no file"),
    "monitoring.*": unused_key("logger.wandb_* are the keys of W&B"),
}
