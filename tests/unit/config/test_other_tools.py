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

from dit.config_loading import ConfigError, load_config
from dit.config_loading.cli import parse_arguments
from dit.models.cost import trained_count
from dit.models.registry import FAMILIES
from dit.objectives.registry import training_objective
from recipes.runs import RECIPES
from tests.packs import run_config
from tests.tables import table

FILES = {
    "automodel.yaml": ("automodel", "wan"),
    "fastvideo.yaml": ("fastvideo", "dit"),
    "main.toml": ("diffusion_pipe", "hunyuan_video"),
}
OURS = {"optimizer.lr", "optimizer.weight_decay"}  # diffusion-pipe's names are the same


def leaves(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [prefix]
    dot = f"{prefix}." if prefix else ""
    return [leaf for name, value in values.items() for leaf in leaves(value, f"{dot}{name}")]


def shown(value: Any) -> Any:
    """As YAML has it."""
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_read_or_named_with_the_reason(name: str, tmp_path: Path, caplog) -> None:
    tool, family = FILES[name]
    text, expected = table(__file__, tool), table(__file__, f"{tool}_read")
    file = tmp_path / name
    file.write_text(text)
    with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
        words = [f"model.family={family}"]
        config = load_config(run_config(), config_file=file, overrides=words)
    for key, value in expected.items():
        group, _, field = key.partition(".")
        assert shown(getattr(getattr(config, group), field)) == value, key
    said = [record.getMessage() for record in caplog.records]
    # Beside how each is read: what it is read as has no effect with the others.
    said = [line for line in said if "not used without" not in line]
    values = tomllib.loads(text) if name.endswith("toml") else yaml.safe_load(text)
    keys = {*leaves(values), *({"fsdp"} & {*values})}  # a group that has a meaning itself
    for key in keys - OURS:
        (line,) = [one for one in said if one.startswith(f"{key}=")]
        assert ": read as " in line or ": read, not used: " in line or line.endswith("not used")
        assert str(file) in line
    assert len(said) == len(keys - OURS)
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
    assert config.objective.logit_mean == -0.5


def test_our_keys_and_overrides_stand_beside_theirs(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(table(__file__, "automodel"))
    tokens = ["optimizer.lr=1e-3", "--fsdp.tp_size", "1", "~wandb", "model.name=dit_s"]
    tokens += ["~model.pipeline_spec"]
    argv = ["--config", str(file), *tokens]
    config = parse_arguments(argv, recipes=RECIPES).config
    assert (config.optimizer.lr, config.model.tensor_model_parallel_size) == (1e-3, 1)
    assert (config.logger.wandb_project, config.model.num_layers) == (None, 12)


@pytest.mark.parametrize(("token", "said"), table(__file__, "refused"))
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


@pytest.mark.parametrize(("key", "advice"), table(__file__, "near_names"))
def test_only_near_names_are_proposed(key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), overrides=[f"{key}=1"])
    assert advice in caught.value.problems[0]


@pytest.mark.parametrize(("token", "group", "name", "value"), table(__file__, "one_key"))
def test_one_key(token: str, group: str, name: str, value: object) -> None:
    config = load_config(run_config(), overrides=[token])
    assert shown(getattr(getattr(config, group), name)) == value


@pytest.mark.parametrize(("token", "theirs"), table(__file__, "optimizers"))
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


@pytest.mark.parametrize(
    ("token", "scale", "rate", "decay"),
    [  # steps of 0.02 of matrices of 96 x 96, as torch's `original` and `spectral` make them
        ("optim.optimizer._target_=torch.optim.Muon", "sqrt(max(1, ", 0.0102, 0.196),
        ("optimizer.type=muon", "sqrt(max(1, ", 0.0102, 0.196),
        ("optimizer.optimizer=dist_muon", "sqrt(max(rows, ", 0.1, 0.02),
        ("optimizer.optimizer=muon", "sqrt(max(rows, ", 0.1, 0.02),
    ],
)
def test_learning_rates_of_other_muons(token, scale, rate, decay, caplog) -> None:
    given = ["optimizer.lr=0.02", "optimizer.weight_decay=0.1", token]
    given += ["model.hidden_size=96", "model.num_attention_heads=4"]
    with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
        load_config(run_config(), overrides=given)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert f"scales by {scale}" in said
    assert f"set optimizer.lr={rate:.3g} and optimizer.weight_decay={decay:.3g}, which" in said


def test_options_of_other_muons_are_read() -> None:
    torchs = [f"optim.optimizer.{one}" for one in ("momentum=0.9", "nesterov=false", "ns_steps=6")]
    torchs += ["optim.optimizer._target_=torch.optim.Muon"]
    megatrons = [f"optimizer.muon_{one}" for one in ("momentum=0.9", "use_nesterov=false")]
    megatrons += ["optimizer.muon_num_ns_steps=6", "optimizer.muon_tp_mode=blockwise"]
    for tokens in (torchs, [*megatrons, "optimizer.optimizer=dist_muon"]):
        found = load_config(run_config(), overrides=tokens).optimizer
        assert (found.muon_momentum, found.muon_nesterov, found.muon_steps) == (0.9, False, 6)


def test_the_own_key_says_which_optimizer_there_is(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
        found = load_config(run_config(), overrides=["optimizer.type=adamw", "optimizer.kind=muon"])
    assert found.optimizer.kind == "muon"
    assert "read, not used: optimizer.kind=muon is set as well" in caplog.text


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
    assert (config.objective.name, config.objective.level_range) == ("flow", expected)


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
    c = load_config(run_config(), overrides=said).objective
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


def test_guidance_that_stays_clips_as_diffusion_pipe_does(caplog) -> None:
    """Its loss is ours divided by cfg²."""
    for said, expected in (
        (("gradient_clipping=0.5",), (None, 0.5)),
        (("model.cfg=4",), (4.0, 16.0)),
        (("model.cfg=4", "gradient_clipping=0.5"), (4.0, 8.0)),
        (("model.cfg=1",), (None, 1.0)),
        (("model.cfg=4", "optimizer.clip_grad=1"), (4.0, 1.0)),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dit.config_loading"):
            config = load_config(run_config(), overrides=said)
        assert (config.objective.cfg_target, config.optimizer.clip_grad) == expected
        lines = [r.getMessage() for r in caplog.records if "model.cfg" in r.getMessage()]
        assert ("samples whose caption is dropped" in "".join(lines)) == ("cfg" in said[0])
    with pytest.raises(ConfigError, match=r"cfg.*expected a number"):
        load_config(run_config(), overrides=["model.cfg=true"])


def test_every_family_is_a_network_of_diffusion_pipe():
    """But LongCat-Image; and each of its networks that is one of ours is taken for it."""
    from dit.config_loading.foreign.diffusion_pipe import _FAMILIES

    assert set(_FAMILIES.values()) == set(FAMILIES) - {"longcat"}
    config = load_config(run_config(), overrides=["model.type=flux", "model.family=flux"])
    assert config.model.family == "flux"


def test_a_file_of_diffusion_pipe_for_flux_2() -> None:
    """Parts by the names of ComfyUI; its count of tokens for the shift is a quarter of FLUX.2's."""
    config = load_config(
        run_config(),
        overrides=[
            *("model.type=flux2", "model.name=flux2_klein_4b", "model.flux_shift=true"),
            *("model.diffusion_model=a.safetensors", "model.vae=b.safetensors"),
            'model.text_encoders=[{"path": "c.safetensors", "type": "flux2"}]',
            *("model.diffusion_model_dtype=float8", "adapter.type=lora", "adapter.rank=8"),
            "dataset.task_encoder_seq_length=4096",
        ],
    )
    told = config.objective
    assert (told.base_image_seq_len, told.max_image_seq_len) == (1024, 16384)
    assert config.lora.base_dtype == "float8_e4m3" and config.model.family == "flux2"


def test_a_shift_of_diffusion_pipe_replaces_one_by_tokens() -> None:
    ours = ["model.type=omnigen2", "model.name=omnigen2"]
    assert load_config(run_config(), overrides=ours).objective.shift_base_tokens == 400
    for word, shift in (("flux_shift=true", ("exponential", 1.0)), ("shift=3", (None, 3.0))):
        told = load_config(run_config(), overrides=[*ours, f"model.{word}"]).objective
        assert (told.time_shift_type, told.flow_shift) == shift and told.shift_base_tokens is None
        assert (told.base_image_seq_len, told.max_image_seq_len) == (256, 4096)  # of its tokens


def test_the_first_frame_that_clips_of_ltx_video_keep_in_diffusion_pipe():
    ltx = ["model.type=ltx-video", "model.name=ltxv_2b"]
    config = load_config(run_config(), overrides=[*ltx, "model.first_frame_conditioning_p=0.25"])
    assert config.objective.given_frames == (0.75, 0.25)
    with pytest.raises(ConfigError, match="expected a number from 0 to 1"):
        load_config(run_config(), overrides=[*ltx, "model.first_frame_conditioning_p=2"])
