"""Files and command lines of AutoModel, FastVideo and diffusion-pipe load, and each key is named.

The files are what those tools' own documents and examples show.
"""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dit.config.inlining import value_of
from dit.config_loading import ConfigError, load_config, parse_arguments
from dit.models.cost import trained_count
from dit.models.registry import FAMILIES
from dit.objectives.registry import training_objective
from recipes.runs import RECIPES
from tests.packs import run_config

AUTOMODEL = """
seed: 42
wandb: {project: wan-pretrain, mode: online, name: first}
dist_env: {backend: nccl, timeout_minutes: 30}
model:
  pretrained_model_name_or_path: Wan-AI/Wan2.1-T2V-1.3B-Diffusers
  mode: pretrain
  pipeline_spec: {transformer_cls: WanTransformer3DModel, subfolder: transformer}
step_scheduler:
  global_batch_size: 8
  local_batch_size: 1
  ckpt_every_steps: 1000
  num_epochs: 100
  max_steps: 5000
  log_every: 2
data:
  dataloader:
    _target_: nemo_automodel.components.datasets.diffusion.build_video_multiresolution_dataloader
    cache_dir: /path/to/processed_meta
    model_type: wan
    base_resolution: [512, 512]
    dynamic_batch_size: false
    shuffle: true
    drop_last: false
    num_workers: 3
optim: {learning_rate: 5e-5, optimizer: {weight_decay: 0.1, betas: [0.9, 0.98]}}
lr_scheduler: {lr_decay_style: linear, lr_warmup_steps: 50, min_lr: 1e-6}
flow_matching:
  adapter_type: simple
  use_sigma_noise: true
  timestep_sampling: uniform
  logit_std: 1.5
  flow_shift: 2.5
  mix_uniform_ratio: 0.2
  use_loss_weighting: true
  num_train_timesteps: 1000
fsdp:
  tp_size: 2
  cp_size: 1
  pp_size: 1
  dp_size: none
  dp_replicate_size: 1
  activation_checkpointing: true
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  match_all_linear: false
  dim: 64
  alpha: 32
  dropout: 0.1
  use_dora: false
  lora_A_init: xavier
  lora_dtype: torch.bfloat16
  target_modules: ["*.to_q", "*.to_v"]
checkpoint:
  enabled: true
  checkpoint_dir: runs/wan
  model_save_format: safetensors
  save_consolidated: true
  diffusers_compatible: true
  restore_from: null
"""
AUTOMODEL_READ = {
    "lora.rank": 64,
    "lora.alpha": 32.0,
    "lora.dropout": 0.1,
    "lora.dtype": "bf16",
    "lora.targets": ("*.to_q", "*.to_v"),
    "rng.seed": 42,
    "logger.wandb_project": "wan-pretrain",
    "logger.wandb_mode": "online",
    "logger.wandb_exp_name": "first",
    "logger.log_interval": 2,
    "dist.distributed_timeout_minutes": 30,
    "train.train_iters": 5000,
    "train.global_batch_size": 8,
    "checkpoint.save_interval": 1000,
    "checkpoint.save": "runs/wan",
    "checkpoint.also_save_hf": True,
    "dataset.num_workers": 3,
    "optimizer.lr": 5e-5,
    "optimizer.weight_decay": 0.1,
    "optimizer.adam_beta1": 0.9,
    "optimizer.adam_beta2": 0.98,
    "optimizer.min_lr": 1e-6,
    "scheduler.lr_decay_style": "linear",
    "scheduler.lr_warmup_iters": 50,
    "objective.name": "flow",
    "objective.density": "uniform",
    "objective.logit_std": 1.5,
    "objective.flow_shift": 2.5,
    "objective.weighting": "linear",
    "model.tensor_model_parallel_size": 2,
    "model.recompute_granularity": "full",
}
FASTVIDEO = """
models:
  student: {_target_: fastvideo.WanModel, init_from: Wan-AI/Wan2.1, flow_shift: 3}
method: {_target_: fastvideo.train.methods.fine_tuning.finetune.FineTuneMethod}
engine: {parallelism: {tp_size: 1, hsdp_replicate_dim: 1}, precision: {dit: fp32}}
training:
  distributed: {num_gpus: 8, sp_size: 2, hsdp_shard_dim: 8}
  data: {data_path: data/x, dataloader_num_workers: 4, training_cfg_rate: 0.2, seed: 1000}
  optimizer:
    learning_rate: 1e-5
    betas: [0.9, 0.999]
    weight_decay: 0.02
    lr_scheduler: constant
    lr_warmup_steps: 0
  loop: {max_train_steps: 4000, gradient_accumulation_steps: 8}
  checkpoint:
    output_dir: out/x
    training_state_checkpointing_steps: 500
    checkpoints_total_limit: 2
    resume_from_checkpoint: latest
  tracker: {project_name: fv, run_name: one}
  model:
    weighting_scheme: mode
    mode_scale: 1.0
    precondition_outputs: false
    enable_gradient_checkpointing_type: full
callbacks:
  grad_clip: {_target_: x.GradNormClipCallback, max_grad_norm: 2.0}
  ema: {decay: 0.999, start_iter: 0}
  validation: {dataset_file: p.json, every_steps: 100, sampling_steps: [50], guidance_scale: 5.0}
"""
FASTVIDEO_READ = {
    "objective.flow_shift": 3,
    "objective.name": "flow",
    "objective.density": "mode",
    "objective.text_dropout": 0.2,
    "model.context_parallel_size": 2,
    "model.recompute_granularity": "full",
    "dataset.num_workers": 4,
    "rng.seed": 1000,
    "optimizer.lr": 1e-5,
    "optimizer.adam_beta2": 0.999,
    "optimizer.clip_grad": 2.0,
    "scheduler.lr_decay_style": "constant",
    "train.train_iters": 4000,
    "train.eval_interval": 100,
    "checkpoint.save": "out/x",
    "checkpoint.save_interval": 500,
    "checkpoint.keep_last": 2,
    "checkpoint.load": None,
    "logger.wandb_project": "fv",
    "ema.kind": "constant",
    "ema.decay": 0.999,
    "validation.prompts_file": "p.json",
    "validation.sampling_steps": 50,
    "validation.guidance": 5.0,
}
DIFFUSION_PIPE = """
output_dir = '/data/runs/test'
dataset = 'examples/dataset.toml'
eval_datasets = [{name = 'something', config = 'path/to/eval_dataset.toml'}]
epochs = 1000
max_steps = 5000
micro_batch_size_per_gpu = [[512, 4], [1024, 1]]
image_micro_batch_size_per_gpu = 4
pipeline_stages = 2
gradient_accumulation_steps = 4
gradient_clipping = 0.5
warmup_steps = 100
lr_scheduler = 'linear'
eval_every_n_steps = 70
eval_every_n_epochs = 1
eval_before_first_step = true
save_every_n_steps = 300
save_every_n_epochs = 2
checkpoint_every_n_minutes = 120
activation_checkpointing = 'unsloth'
partition_method = 'parameters'
save_dtype = 'bfloat16'
caching_batch_size = 1
map_num_proc = 32
compile = true
steps_per_print = 5
video_clip_mode = 'single_beginning'
blocks_to_swap = 3
pseudo_huber_c = 0.5

[model]
type = 'hunyuan-video'
transformer_path = '/models/x.safetensors'
dtype = 'bfloat16'
transformer_dtype = 'float8'
timestep_sample_method = 'logit_normal'

[adapter]
type = 'lora'
rank = 32
dtype = 'bfloat16'
dropout = 0.05
init_from_existing = '/data/lora/epoch50'
fuse_adapters = []

[optimizer]
type = 'AdamW8bitKahan'
lr = 5e-5
betas = [0.9, 0.99]
weight_decay = 0.02
stabilize = false

[monitoring]
enable_wandb = false
wandb_api_key = 'abc123'
wandb_tracker_name = ''
wandb_run_name = 'one'
"""
DIFFUSION_PIPE_READ = {
    "lora.rank": 32,
    "lora.alpha": None,
    "lora.dropout": 0.05,
    "lora.dtype": "bf16",
    "lora.targets": ("*blocks.*",),
    "lora.init_from": "/data/lora/epoch50",
    "checkpoint.save": "/data/runs/test",
    "checkpoint.save_interval": 300,
    "train.train_iters": 5000,
    "train.eval_interval": 70,
    "validation.at_start": True,
    "model.pipeline_model_parallel_size": 2,
    "model.recompute_granularity": "full",
    "model.compile": True,
    "model.precision": "bf16",
    "model.blocks_to_swap": 3,
    "lora.base_dtype": "float8_e4m3",
    "optimizer.clip_grad": 0.5,
    "optimizer.lr": 5e-5,
    "optimizer.adam_beta2": 0.99,
    "optimizer.weight_decay": 0.02,
    "scheduler.lr_warmup_iters": 100,
    "scheduler.lr_decay_style": "linear",
    "objective.name": "flow",
    "objective.density": "logit_normal",
    "objective.loss": "huber",
    "objective.huber_c": 0.5,
    "logger.log_interval": 5,
    "logger.wandb_mode": "disabled",
    "logger.wandb_project": None,
    "logger.wandb_exp_name": "one",
}
FILES = {
    "automodel.yaml": (AUTOMODEL, AUTOMODEL_READ, "wan"),
    "fastvideo.yaml": (FASTVIDEO, FASTVIDEO_READ, "dit"),
    "main.toml": (DIFFUSION_PIPE, DIFFUSION_PIPE_READ, "hunyuan_video"),
}
OURS = {"optimizer.lr", "optimizer.weight_decay"}  # diffusion-pipe's names are the same


def leaves(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [prefix]
    dot = f"{prefix}." if prefix else ""
    return [leaf for name, value in values.items() for leaf in leaves(value, f"{dot}{name}")]


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_read_or_named_with_the_reason(name: str, tmp_path: Path, caplog) -> None:
    text, expected, family = FILES[name]
    file = tmp_path / name
    file.write_text(text)
    with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
        words = [f"model.family={family}"]
        config = load_config(run_config(), config_file=file, overrides=words)
    for key, value in expected.items():
        group, _, field = key.partition(".")
        assert value_of(getattr(config, group), field) == value, key
    said = [record.getMessage() for record in caplog.records]
    keys = leaves(tomllib.loads(text) if name.endswith("toml") else yaml.safe_load(text))
    for key in set(keys) - OURS:
        (line,) = [one for one in said if one.startswith(f"{key}=")]
        assert ": read as " in line or ": read, not used: " in line or line.endswith("not used")
        assert str(file) in line
    assert len(said) == len(set(keys) - OURS)
    assert "checkpoint.load_hf" in said[0]
    assert "abc123" not in caplog.text


def test_fastvideos_flat_arguments(caplog) -> None:
    typed = """--model_path Wan-AI/Wan2.1 --pretrained_model_name_or_path Wan-AI/Wan2.1
    --tracker_project_name fv --output_dir out/x --max_train_steps 4000 --train_batch_size 1
    --train_sp_batch_size 1 --gradient_accumulation_steps 8 --num_latent_t 20 --num_height 480
    --num_width 832 --num_frames 77 --enable_gradient_checkpointing_type full --num_gpus 4
    --sp_size 4 --tp_size 1 --hsdp_replicate_dim 1 --hsdp_shard_dim 4 --data_path data/x
    --dataloader_num_workers 1 --log_validation --validation_dataset_file p.json
    --validation_steps 200 --validation_sampling_steps 50 --validation_guidance_scale 3.0
    --learning_rate 5e-5 --mixed_precision bf16 --weight_only_checkpointing_steps 1000
    --training_state_checkpointing_steps 1000 --weight_decay 1e-4 --max_grad_norm 1.0
    --inference_mode False --checkpoints_total_limit 3 --training_cfg_rate 0.1
    --multi_phased_distill_schedule 4000-1 --not_apply_cfg_solver --dit_precision fp32
    --num_euler_timesteps 50 --ema_start_step 0 --lora_training True --lora_rank 32
    --lora_alpha 64 --dry-run"""
    argv = typed.split()
    with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
        config = parse_arguments(argv, recipes=RECIPES).config
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (5e-5, 1e-4)
    assert (config.train.train_iters, config.model.context_parallel_size) == (4000, 4)
    assert (config.validation.sampling_steps, config.validation.guidance) == (50, 3.0)
    assert (config.lora.rank, config.lora.alpha) == (32, 64)
    assert config.lora.targets == ("attention",)
    flags = [token for token in argv if token.startswith("--")]
    assert len(caplog.records) == len(flags) - 1


@pytest.mark.parametrize("written", ["{}={}", "+{}={}", "--{}={}", "--{} {}"])
def test_an_argument_without_a_dot_is_written_as_any_key(written: str) -> None:
    """`learning_rate=2e-4` once lost its first two letters, as if they were dashes."""
    theirs = (("learning_rate", "2e-4"), ("betas", "[0.8,0.95]"), ("logit_mean", "-0.5"))
    argv = [part for name, value in theirs for part in written.format(name, value).split()]
    config = parse_arguments([*argv, "--mock"], recipes=RECIPES).config
    assert config.optimizer.lr == 2e-4
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.8, 0.95)
    assert config.objective.flow.logit_mean == -0.5


def test_our_keys_and_overrides_stand_beside_theirs(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(AUTOMODEL)
    tokens = ["optimizer.lr=1e-3", "--fsdp.tp_size", "1", "~wandb", "model.name=dit_s"]
    tokens += ["~model.pipeline_spec"]
    argv = ["--config", str(file), *tokens]
    config = parse_arguments(argv, recipes=RECIPES).config
    assert (config.optimizer.lr, config.model.tensor_model_parallel_size) == (1e-3, 1)
    assert (config.logger.wandb_project, config.model.num_layers) == (None, 12)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("flow_matching.timestep_sampling=beta", "(flow_matching.timestep_sampling, command line)"),
        ("flow_matching.use_sigma_noise=false", "is not supported: t is drawn by"),
        ("flow_matching.loss_weighting_scheme=bsmntw", "objective.weighting is none or linear"),
        ("optim.optimizer.betas=[0.9]", "expected two numbers, such as [0.9, 0.999]"),
        ("optim.learning_rate=fast", "(optim.learning_rate, command line): expected a number"),
        ("pseudo_huber_c=0", "huber_c=0.0 must lie in [1e-06, 1000000]"),
        ("huber_delta=0.5", "objective.loss=huber is the pseudo-Huber loss"),
        ("training.validation.sampling_steps=[4, 50]", "has 2 values, and validation.sampling_ste"),
        ("training.vsa.sparsity=0.9", "is not supported: attention is dense here"),
        ("cache_only=true", "is not supported: data are packed"),
        ("dataset=folder", "is a group and holds no value; set a key such as dataset.path"),
        ("model.dtype=float16", "model.precision is bf16 or fp32"),
        (
            "model.type=wan",
            "names a network of model.family=wan, and this run trains model.family=d",
        ),
        ("model.type=sdxl", "names none that is here, and this run trains model.family=dit"),
        (
            "model.pipeline_spec.transformer_cls=FluxTransformer2DModel",
            "names a network of model.family=flux, and this run trains model.family=dit",
        ),
        ("adapter.type=lokr", "is not supported: adapters are plain LoRA"),
        ("adapter.alpha=16", "diffusion-pipe has alpha = rank"),
        ("adapter.dtype=float16", "lora.dtype is bf16 or fp32"),
        ("adapter.exclude_modules=[proj]", "lora.targets names the linears"),
        ("adapter.fuse_adapters=[{path: x, weight: 1.0}]", "export --merged"),
        ("optimizer.type=Prodigy", "the optimizer is AdamW, and learning rates of others"),
        ("optim.optimizer._target_=torch.optim.SGD", "is not supported: the optimizer is AdamW"),
        ("optimizer.main_params_dtype=torch.float16", "the optimizer keeps float32 weights"),
        ("peft.use_dora=true", "is not supported: adapters are plain LoRA"),
        ("peft.match_all_linear=true", "lora.targets names the linears"),
        ("lora_training=false", "lora.rank turns adapters on"),
        ("training.lora.target_modules=to_q", "expected a list of names"),
    ],
)
def test_a_value_that_asks_for_what_is_not_done_is_an_error(token: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), overrides=[token])
    (problem,) = caught.value.problems
    assert said in problem


def test_a_toml_that_is_none_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    for text in (b"a = ", b"\xff", b"a = " + b"[" * 5000, b"a = " + b"9" * 5000):
        file.write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            load_config(run_config(), config_file=file)
        assert caught.value.problems[0].startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("optimizer.quality", "docs/coming_from.md"),
        ("model.warp", "docs/coming_from.md"),
        ("optimizer.bets", "docs/coming_from.md"),  # not validation.sets
        ("plugin.devices", "docs/coming_from.md"),
        ("optimizer.adam_beta3", "did you mean optimizer.adam_beta2?"),
        ("optimizer.lrr", "did you mean optimizer.lr?"),
    ],
)
def test_only_near_names_are_proposed(key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), overrides=[f"{key}=1"])
    assert advice in caught.value.problems[0]


@pytest.mark.parametrize(
    ("token", "group", "name", "value"),
    [
        ("fsdp.cp_size=2", "model", "context_parallel_size", 2),
        ("fsdp.pp_size=2", "model", "pipeline_model_parallel_size", 2),
        ("optim.optimizer.eps=1e-6", "optimizer", "adam_eps", 1e-6),
        ("flow_matching.logit_mean=0.5", "objective", "logit_mean", 0.5),
        ("flow_matching.cfg_dropout_prob=0.3", "objective", "text_dropout", 0.3),
        ("checkpoint.restore_from=LATEST", "checkpoint", "load", None),
        ("checkpoint.restore_from=runs/a", "checkpoint", "load", "runs/a"),
        ("step_scheduler.val_every_steps=7", "train", "eval_interval", 7),
        ("engine.parallelism.sp_size=4", "model", "context_parallel_size", 4),
        ("training.optimizer.max_grad_norm=3", "optimizer", "clip_grad", 3.0),
        ("model.sigmoid_scale=0.7", "objective", "logit_std", 0.7),
        ("force_constant_lr=0.002", "optimizer", "lr", 0.002),
        ("activation_checkpointing=false", "model", "recompute_granularity", "none"),
        ("models.student.lora.rank=16", "lora", "rank", 16),
        ("training.lora.alpha=8", "lora", "alpha", 8.0),
        ("models.student.lora.target_modules=[to_q, ffn]", "lora", "targets", ("*to_q*", "*ffn*")),
    ],
)
def test_one_key(token: str, group: str, name: str, value: object) -> None:
    config = load_config(run_config(), overrides=[token])
    assert value_of(getattr(config, group), name) == value


@pytest.mark.parametrize(
    ("token", "theirs"),
    [
        ("optimizer.type=AdamW8bitKahan", 2),
        ("optimizer.type=adamw_8bit", 2),
        ("optim.optimizer._target_=bitsandbytes.optim.AdamW8bit", 2),
        ("optimizer.type=Adafactor", 0),
        ("optimizer.type=adamw_optimi", None),
        ("optim.optimizer._target_=torch.optim.AdamW", None),
    ],
)
@pytest.mark.parametrize("lora", [(), ("lora.rank=4",)])
def test_what_adamw_costs_in_the_place_of_another_optimizer(
    token: str, theirs: int | None, lora: tuple[str, ...], caplog
) -> None:
    with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
        config = load_config(run_config(), overrides=[*lora, token])
    (said,) = [record.getMessage() for record in caplog.records]
    count = trained_count(config)
    assert f"{token} (command line): read as AdamW" in said.replace('"', "")
    assert ("would change with the layout" in said) is (theirs is not None)
    if theirs is not None:
        sizes = [_shown(size * count) for size in (8, 8 - theirs)]
        numbers = f"8 bytes for each of {count:,} trained numbers, {sizes[0]} over all ranks"
        assert numbers in said and f"about {sizes[1]} more than what" in said


def _shown(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def test_moments_of_megatron_bridge() -> None:
    """Its file asks for them with a switch that is not needed here, and torch's names."""
    theirs = ("use_precision_aware_optimizer=true", "exp_avg_dtype=torch.bfloat16")
    theirs += ("exp_avg_sq_dtype=torch.uint8", "main_params_dtype=torch.float32")
    config = load_config(run_config(), overrides=[f"optimizer.{one}" for one in theirs])
    assert (config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype) == ("bf16", "fp8")


def test_betas_become_two_keys() -> None:
    config = load_config(run_config(), overrides=["optimizer.betas=[0.8, 0.9]"])
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.8, 0.9)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("model.min_t=0.875",), (0.875, 1.0)),
        (("model.min_t=0", "model.max_t=0.875"), (0.0, 0.875)),
        (("model.min_t=0.1", "model.max_t=0.5", "model.min_t=0.2"), (0.2, 0.5)),
        (("model.min_t=0.0", "model.max_t=1"), None),
        (("model.min_t=0.5", "objective.level_range=[0.6,1]"), (0.6, 1.0)),
    ],
)
def test_levels_of_an_expert(said: tuple[str, ...], expected: object) -> None:
    config = load_config(run_config(), overrides=said)
    assert (config.objective.name, config.objective.flow.level_range) == ("flow", expected)


@pytest.mark.parametrize("token", ["model.min_t=true", "model.max_t=a", "model.min_t=2"])
def test_what_are_no_levels(token: str) -> None:
    with pytest.raises(ConfigError, match=r"min_t|max_t"):
        load_config(run_config(), overrides=[token])


LINE = (0.5, 1.15, 256, 4096)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("model.flux_shift=true",), ("exponential", 1.0, *LINE)),
        (("model.lumina_shift=true", "model.shift=0"), ("exponential", 1.0, *LINE)),
        (("model.flux_shift=true", "model.shift=3"), (None, 3.0, *LINE)),
        (("objective.max_shift=0.9", "model.flux_shift=true"), ("exponential", 1.0, *LINE)),
        (("model.flux_shift=false",), (None, 1.0, *LINE)),
    ],
)
def test_shifts_of_diffusion_pipe(said: tuple[str, ...], expected: tuple[object, ...]) -> None:
    """A constant one counts more, as in its `prepare_inputs`."""
    c = load_config(run_config(), overrides=said).objective.flow
    line = (c.base_shift, c.max_shift, c.base_image_seq_len, c.max_image_seq_len)
    assert (c.time_shift_type, c.flow_shift, *line) == expected


def test_a_shift_by_tokens_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match=r"flux_shift.*expected true or false"):
        load_config(run_config(), overrides=["model.flux_shift=3"])


def test_levels_are_those_that_diffusion_pipe_draws() -> None:
    """Quantiles of a long table, sliced: min_t and max_t are levels after the shift."""
    config = load_config(
        run_config(),
        overrides=[
            *("model.timestep_sample_method=logit_normal", "model.sigmoid_scale=0.8"),
            *("model.shift=3", "model.min_t=0.6", "model.max_t=0.9"),
        ],
    )
    quantile = torch.linspace(1e-6, 1 - 1e-6, 1_000_001, dtype=torch.float64)
    t = torch.sigmoid(0.8 * torch.distributions.Normal(0.0, 1.0).icdf(quantile))
    t = 3 * t / (1 + 2 * t)
    table = t[torch.searchsorted(t, 0.6) : torch.searchsorted(t, 0.9)]
    asked = torch.tensor([0.1, 0.5, 0.9])
    theirs = table[(asked * len(table)).long()].float()
    ours = training_objective(config.objective).levels(asked, [4, 4, 4])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_image_to_video_of_networks_that_take_both(caplog) -> None:
    token, key = "flow_matching.i2v_prob=0.3", "objective.image_condition_probability"
    for model, expected in (
        (["model.name=wan2.2_ti2v_5b"], 0.3),
        (["model.family=wan", "model.image_condition=clean_first_frame"], 0.3),
        (["model.name=wan2.1_t2v_1.3b"], 1.0),
        (["model.name=wan2.2_i2v_a14b"], 1.0),  # always has its condition
        (["model.name=dit_s"], 1.0),
        (["model.name=wan2.2_ti2v_5b", f"{key}=0.6"], 0.6),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
            config = load_config(run_config(), overrides=[token, *model])
        assert config.objective.image_condition_probability == expected
        (line,) = [r.getMessage() for r in caplog.records if "i2v_prob" in r.getMessage()]
        assert (f": read as {key}=0.3" in line) == (expected < 1)
        assert (": read, not used: drawn for each" in line) == (expected == 1)
    for wrong in (["flow_matching.i2v_prob=3"], [token, "train.train_iters=-1"]):
        with pytest.raises(ConfigError) as caught:
            load_config(run_config(), overrides=wrong)
        assert len(caught.value.problems) == 1


def test_every_family_is_a_network_of_diffusion_pipe():
    """And each of its networks that is one of ours is taken for it."""
    from dit.config_loading.foreign.diffusion_pipe import _FAMILIES

    assert set(_FAMILIES.values()) == set(FAMILIES)
    config = load_config(run_config(), overrides=["model.type=flux", "model.family=flux"])
    assert config.model.family == "flux"
