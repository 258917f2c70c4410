"""Files of AutoModel, FastVideo and diffusion-pipe become files of ours, and each key is named.

The files are what those tools' own documents and examples show.
"""

from __future__ import annotations

import logging
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dit.config import Problems, RunConfig
from dit.config_loading import ConfigError, load_config
from dit.config_loading.cli import parse_arguments
from dit.config_loading.schema import Schema
from dit.foreign.__main__ import main
from dit.foreign.dfm import SHARED
from dit.foreign.translate import FOREIGN
from dit.models.registry import FAMILIES, families
from dit.objectives.registry import training_objective
from recipes.runs import RECIPES
from tests.packs import run_config
from tests.tables import table
from tests.their_files import run_and_notes, run_of

FILES = {
    "automodel.yaml": ("automodel", "wan"),
    "fastvideo.yaml": ("fastvideo", "dit"),
    "main.toml": ("diffusion_pipe", "hunyuan_video"),
}
DFM = str(Path(__file__).with_name("test_dfm_file.py"))
OURS = {"optimizer.lr", "optimizer.weight_decay"}  # diffusion-pipe's names are the same


def leaves(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [prefix]
    dot = f"{prefix}." if prefix else ""
    return [leaf for name, value in values.items() for leaf in leaves(value, f"{dot}{name}")]


def shown(value: Any) -> Any:
    """As YAML has it."""
    return list(value) if isinstance(value, tuple) else value


def written(name: str, folder: Path) -> Path:
    file = folder / name
    file.write_text(table(__file__, FILES[name][0]))
    return file


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_read_or_named_with_the_reason(name: str, tmp_path: Path, caplog) -> None:
    tool, family = FILES[name]
    text, expected = table(__file__, tool), table(__file__, f"{tool}_read")
    file = written(name, tmp_path)
    with caplog.at_level(logging.WARNING):
        config = parse(file, recipes={"dit_xl": run_config})
    for key, value in expected.items():
        group, _, field = key.partition(".")
        assert shown(getattr(getattr(config, group), field)) == value, key
    assert config.model.family == family
    said = [record.getMessage() for record in caplog.records]
    # Beside how each is read: what it is read as has no effect with the others.
    *said, last = [line for line in said if "not used without" not in line]
    values = tomllib.loads(text) if name.endswith("toml") else yaml.safe_load(text)
    keys = {*leaves(values), *({"fsdp"} & {*values})}  # a group that has a meaning itself
    for key in keys - OURS:
        (line,) = [one for one in said if one.startswith(f"{key}=")]
        assert ": read as " in line or ": read, not used: " in line or line.endswith("not used")
        assert str(file) in line
    assert len(said) == len(keys - OURS)
    assert "checkpoint.load_hf" in said[0]
    assert "abc123" not in caplog.text
    assert last.endswith(f"-m dit.foreign {file} > ours.yaml")


def parse(file: Path, *tokens: str, recipes: Any = RECIPES) -> RunConfig:
    return parse_arguments(["--config", str(file), *tokens], recipes=recipes).config


@pytest.mark.parametrize("name", FILES)
def test_the_file_in_our_keys_is_the_same_run(name: str, tmp_path: Path, capsys, caplog) -> None:
    ours = ["model.num_layers=6", "~logger.wandb_project", "dataset.mock_samples.0.width=8"]
    theirs = parse(written(name, tmp_path), *ours)
    main([str(tmp_path / name), *ours])
    text = capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(text)
    caplog.clear()
    assert parse(tmp_path / "ours.yaml") == theirs
    assert "other tools" not in caplog.text and "not used:" not in caplog.text
    notes = [line for line in text.splitlines() if line.startswith("# ") and ": read" in line]
    assert len(notes) > 20
    assert "abc123" not in text


def test_a_file_of_ours_is_not_translated(tmp_path: Path, caplog) -> None:
    """Even one that holds keys of theirs, whose error names ours and the command."""
    file = tmp_path / "run.yaml"
    file.write_text("train: {train_iters: 3}\nobjective: {name: edm}\noptim: {learning_rate: 1e-3}")
    with pytest.raises(ConfigError) as caught:
        parse(file)
    (problem,) = caught.value.problems
    assert problem == (
        f"optim.learning_rate=0.001 ({file}:3): is a key of other tools; write optimizer.lr=0.001"
    )
    file.write_text("model: {name: dit_s}\nobjective: {name: edm}\noptimizer: {lr: 1e-3}")
    assert parse(file).optimizer.lr == 1e-3 and not caplog.records
    with pytest.raises(ConfigError, match="is not a configuration of a supported tool"):
        main([str(file)])


def test_the_loader_of_a_run_knows_our_keys_only(tmp_path: Path) -> None:
    file = written("automodel.yaml", tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), config_file=file)
    assert all("is a key of other tools; " in problem for problem in caught.value.problems)
    assert len(caught.value.problems) > 40


@pytest.mark.parametrize(("words", "said"), table(__file__, "typed"))
def test_their_keys_on_the_command_line_name_ours(words: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(words.split(), recipes=RECIPES)
    assert len(caught.value.problems) == len(said)
    for problem, expected in zip(caught.value.problems, said, strict=True):
        assert problem.endswith(expected), problem


def test_commands_of_their_documents(tmp_path: Path) -> None:
    """Launchers, scripts and file names are other ones; the words behind them are the same."""
    file = tmp_path / "dit_pretrain.yaml"
    file.write_text(table(DFM, "file"))
    said = ["train.train_iters=20000", "model.num_layers=32", "--mock"]
    for option in ("--config-file", "--config"):
        words = [option, str(file), *said, "dataset.use_train_split_for_val=true"]
        c = parse_arguments(words, recipes=RECIPES).config
        assert (c.train.train_iters, c.model.num_layers, c.dataset.mock) == (20000, 32, True)
        assert c.dataset.use_train_split_for_val and c.dataset.path == "DATASET_FOLDER"
    (tmp_path / "low_memory.toml").write_text(table(__file__, "low_memory"))
    c = parse(tmp_path / "low_memory.toml", "model.name=wan2.1_t2v_14b", "lora.rank=8")
    assert (c.optimizer.adam_beta2, c.model.blocks_to_swap) == (0.99, 32)
    assert c.model.recompute_granularity == "full"
    (tmp_path / "multinode.yaml").write_text(table(__file__, "multinode"))
    c = parse(tmp_path / "multinode.yaml")
    assert (c.ddp.sharding, c.ddp.dp_replicate_size) == ("weights", 2)


def test_fastvideos_flat_arguments_as_a_file() -> None:
    theirs = table(__file__, "flat").split()
    config, notes = run_and_notes(theirs)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (5e-5, 1e-4)
    assert (config.train.train_iters, config.model.context_parallel_size) == (4000, 4)
    assert (config.validation.sampling_steps, config.validation.guidance) == (50, 3.0)
    assert (config.lora.rank, config.lora.alpha) == (32, 64)
    assert config.lora.targets == ("attention",)
    assert len(notes) == len(theirs)


def test_our_keys_and_overrides_stand_above_theirs(tmp_path: Path) -> None:
    file = written("automodel.yaml", tmp_path)
    tokens = ["optimizer.lr=1e-3", "--model.tensor_model_parallel_size", "1"]
    tokens += ["~logger.wandb_project", "model.family=dit", "model.name=dit_s"]
    config = parse(file, *tokens)
    assert (config.optimizer.lr, config.model.tensor_model_parallel_size) == (1e-3, 1)
    assert (config.logger.wandb_project, config.model.num_layers) == (None, 12)
    with pytest.raises(ConfigError, match=r"size of family dit, and model\.family=wan"):
        parse(file, "model.name=dit_s")


def test_the_tables_hide_no_key_of_ours_and_share_only_keys_of_ours() -> None:
    keys = {key for one in families() for key in Schema(one.config).all_keys()}
    # But `dataset`, where diffusion-pipe names a file.
    groups = {key.partition(".")[0] for key in keys}
    hidden = [(k, n) for k in sorted(keys | groups) for n in FOREIGN if fnmatchcase(k, n)]
    assert hidden == [("dataset", "dataset")]
    assert {f"{group}.{name}" for group, names in SHARED.items() for name in names} <= keys


@pytest.mark.parametrize(("token", "said"), table(__file__, "refused"))
def test_a_value_that_asks_for_what_is_not_done_is_an_error(token: str, said: str) -> None:
    with pytest.raises(Problems) as caught:
        run_of([token], *(["model.family=dit"] if "vsa" in token else []))
    assert said in caught.value.problems[0]


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
    config = run_of([token])
    assert shown(getattr(getattr(config, group), name)) == value


@pytest.mark.parametrize(("token", "theirs"), table(__file__, "optimizers"))
def test_what_adamw_costs_in_the_place_of_another_optimizer(token: str, theirs: int | None) -> None:
    config, (said,) = run_and_notes([token])
    assert config.optimizer.kind == "adamw"
    assert f"{token} (F): read as optimizer.kind=adamw" in said.replace('"', "")
    assert ("would depend on the layout" in said) is (theirs is not None)
    if theirs is not None:
        assert f"8 bytes for each trained number, {8 - theirs} more than what" in said


WIDTH = 96


@pytest.mark.parametrize(
    ("token", "scale", "said", "factor"),
    [  # of a matrix of 96 x 96, as torch's `original` and `spectral` scale; ours: 0.2 sqrt(96)
        (f"{key}={name}", *one)
        for one, names in (
            (
                (1.0, "divide optimizer.lr by 0.2 sqrt(model.hidden_size), and multiply", 0.510310),
                ("optim.optimizer._target_=torch.optim.Muon", "optimizer.type=muon"),
            ),
            (
                (WIDTH**0.5, "multiply optimizer.lr by 5, and divide", 5.0),
                ("optimizer.optimizer=dist_muon", "optimizer.optimizer=muon"),
            ),
        )
        for key, _, name in (text.partition("=") for text in names)
    ],
)
def test_learning_rates_of_other_muons(token, scale, said, factor) -> None:
    config, notes = run_and_notes([token])
    assert config.optimizer.kind == "muon" and said in notes[0]
    assert factor * 0.2 * WIDTH**0.5 == pytest.approx(scale, rel=1e-5)


def test_options_of_other_muons_are_read() -> None:
    torchs = [f"optim.optimizer.{one}" for one in ("momentum=0.9", "nesterov=false", "ns_steps=6")]
    torchs += ["optim.optimizer._target_=torch.optim.Muon"]
    megatrons = [f"optimizer.muon_{one}" for one in ("momentum=0.9", "use_nesterov=false")]
    megatrons += ["optimizer.muon_num_ns_steps=6", "optimizer.muon_tp_mode=blockwise"]
    for tokens in (torchs, [*megatrons, "optimizer.optimizer=dist_muon"]):
        found = run_of(tokens).optimizer
        assert (found.muon_momentum, found.muon_nesterov, found.muon_steps) == (0.9, False, 6)


def test_the_own_key_says_which_optimizer_there_is() -> None:
    assert run_of(["optimizer.type=adamw"], "optimizer.kind=muon").optimizer.kind == "muon"


def test_moments_of_megatron_bridge() -> None:
    """Its file asks for them with a switch that is not needed here, and torch's names."""
    theirs = ("use_precision_aware_optimizer=true", "exp_avg_dtype=torch.bfloat16")
    theirs += ("exp_avg_sq_dtype=torch.uint8", "main_params_dtype=torch.float32")
    config = run_of([f"optimizer.{one}" for one in theirs])
    assert (config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype) == ("bf16", "fp8")


def test_betas_become_two_keys() -> None:
    config = run_of(["optimizer.betas=[0.8, 0.9]"])
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2) == (0.8, 0.9)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("model.min_t=0.875",), (0.875, 1.0)),
        (("model.min_t=0", "model.max_t=0.875"), (0.0, 0.875)),
        (("model.min_t=0.2", "model.max_t=0.5"), (0.2, 0.5)),
        (("model.min_t=0.0", "model.max_t=1"), None),
    ],
)
def test_levels_of_an_expert(said: tuple[str, ...], expected: object) -> None:
    config = run_of(said)
    assert (config.objective.name, config.objective.level_range) == ("flow", expected)


@pytest.mark.parametrize("token", ["model.min_t=true", "model.max_t=a", "model.min_t=2"])
def test_what_are_no_levels(token: str) -> None:
    with pytest.raises(Problems, match=r"min_t|max_t"):
        run_of([token])


LINE = (0.5, 1.15, 256, 4096)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("model.flux_shift=true",), ("exponential", 1.0, *LINE)),
        (("model.lumina_shift=true", "model.shift=0"), ("exponential", 1.0, *LINE)),
        (("model.flux_shift=true", "model.shift=3"), (None, 3.0, *LINE)),
        (("model.flux_shift=false",), (None, 1.0, *LINE)),
    ],
)
def test_shifts_of_diffusion_pipe(said: tuple[str, ...], expected: tuple[object, ...]) -> None:
    """A constant one counts more, as in its `prepare_inputs`."""
    c = run_of(said).objective
    line = (c.base_shift, c.max_shift, c.base_image_seq_len, c.max_image_seq_len)
    assert (c.time_shift_type, c.flow_shift, *line) == expected


def test_a_shift_by_tokens_is_true_or_false() -> None:
    with pytest.raises(Problems, match=r"flux_shift.*is not true or false"):
        run_of(["model.flux_shift=3"])


def test_levels_are_those_that_diffusion_pipe_draws() -> None:
    """Quantiles of a long table, sliced: min_t and max_t are levels after the shift."""
    config = run_of(
        [
            *("model.timestep_sample_method=logit_normal", "model.sigmoid_scale=0.8"),
            *("model.shift=3", "model.min_t=0.6", "model.max_t=0.9"),
        ]
    )
    quantile = torch.linspace(1e-6, 1 - 1e-6, 1_000_001, dtype=torch.float64)
    t = torch.sigmoid(0.8 * torch.distributions.Normal(0.0, 1.0).icdf(quantile))
    t = 3 * t / (1 + 2 * t)
    table = t[torch.searchsorted(t, 0.6) : torch.searchsorted(t, 0.9)]
    asked = torch.tensor([0.1, 0.5, 0.9])
    theirs = table[(asked * len(table)).long()].float()
    ours = training_objective(config.objective).levels(asked, [4, 4, 4])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_image_to_video_of_networks_that_take_both() -> None:
    token, key = "flow_matching.i2v_prob=0.3", "objective.image_condition_probability"
    for model, expected in (
        (["model.name=wan2.2_ti2v_5b"], 0.3),
        (["model.family=wan", "model.image_condition=clean_first_frame"], 0.3),
        (["model.name=wan2.1_t2v_1.3b"], 1.0),
        (["model.name=wan2.2_i2v_a14b"], 1.0),  # always has its condition
        (["model.name=dit_s"], 1.0),
        (["model.name=wan2.2_ti2v_5b", f"{key}=0.6"], 0.6),
    ):
        config, (line,) = run_and_notes([token], *model)
        assert config.objective.image_condition_probability == expected
        assert (f": read as {key}=0.3" in line) == (expected < 1)
        assert (": read, not used: drawn for each" in line) == (expected == 1)
    for theirs, ours in (("flow_matching.i2v_prob=3", []), (token, ["train.train_iters=-1"])):
        with pytest.raises(Problems) as caught:
            run_of([theirs], *ours)
        assert len(caught.value.problems) == 1


def test_guidance_that_stays_clips_as_diffusion_pipe_does() -> None:
    """Its loss is ours divided by cfg²."""
    for said, expected in (
        (("gradient_clipping=0.5",), (None, 0.5)),
        (("model.cfg=4",), (4.0, 16.0)),
        (("model.cfg=4", "gradient_clipping=0.5"), (4.0, 8.0)),
        (("model.cfg=1",), (None, 1.0)),
    ):
        config, notes = run_and_notes(said)
        assert (config.objective.cfg_target, config.optimizer.clip_grad) == expected
        lines = [note for note in notes if "model.cfg" in note]
        assert ("samples whose caption is dropped" in "".join(lines)) == ("cfg" in said[0])


@pytest.mark.parametrize(
    ("wrong", "right", "expected"),
    [
        ("model.cfg=true", "gradient_clipping=1.0", "a number"),
        ("gradient_clipping=a", "model.cfg=4", "a number"),
        ("model.max_t=a", "model.min_t=0.5", "a number from 0 to 1"),
        ("model.lumina_shift=3", "model.flux_shift=true", "true or false"),
    ],
)
def test_of_keys_that_are_read_together_the_wrong_one_is_named(wrong, right, expected):
    with pytest.raises(Problems) as caught:
        run_of([wrong, right])
    (problem,) = caught.value.problems
    said = f"is not {expected}; correct it, or leave the key out"
    assert problem.startswith(wrong.partition("=")[0]) and problem.endswith(said)


def test_every_family_is_a_network_of_diffusion_pipe():
    """By its own name, or by ours where it has the same or none."""
    from dit.foreign.diffusion_pipe import _FAMILIES

    assert set(_FAMILIES.values()) == set(FAMILIES)
    assert run_of(["model.type=flux"]).model.family == "flux"


def test_a_file_of_diffusion_pipe_for_flux_2() -> None:
    """Parts by the names of ComfyUI; its count of tokens for the shift is a quarter of FLUX.2's."""
    config = run_of(
        [
            *("model.type=flux2", "model.flux_shift=true"),
            *("model.diffusion_model=a.safetensors", "model.vae=b.safetensors"),
            'model.text_encoders=[{"path": "c.safetensors", "type": "flux2"}]',
            *("model.diffusion_model_dtype=float8", "adapter.type=lora", "adapter.rank=8"),
        ],
        *("model.name=flux2_klein_4b", "dataset.task_encoder_seq_length=4096"),
    )
    told = config.objective
    assert (told.base_image_seq_len, told.max_image_seq_len) == (1024, 16384)
    assert config.lora.base_dtype == "float8_e4m3" and config.model.family == "flux2"


def test_a_shift_of_diffusion_pipe_replaces_one_by_tokens() -> None:
    theirs, ours = "model.type=omnigen2", "model.name=omnigen2"
    assert run_of([theirs], ours).objective.shift_base_tokens == 400
    for word, shift in (("flux_shift=true", ("exponential", 1.0)), ("shift=3", (None, 3.0))):
        told = run_of([theirs, f"model.{word}"], ours).objective
        assert (told.time_shift_type, told.flow_shift) == shift and told.shift_base_tokens is None
        assert (told.base_image_seq_len, told.max_image_seq_len) == (256, 4096)  # of its tokens


def test_the_first_frame_that_clips_of_ltx_video_keep_in_diffusion_pipe():
    ltx, size = "model.type=ltx-video", "model.name=ltxv_2b"
    config = run_of([ltx, "model.first_frame_conditioning_p=0.25"], size)
    assert config.objective.given_frames == (0.75, 0.25)
    with pytest.raises(Problems, match="2 is not a number from 0 to 1"):
        run_of([ltx, "model.first_frame_conditioning_p=2"], size)


def test_how_sparsity_grows_is_read_with_the_sparsity_alone() -> None:
    growth = ["VSA_decay_rate=0.25", "VSA_decay_interval_steps=7"]
    model = run_of(["VSA_sparsity=0.75", *growth]).model
    assert (model.family, model.sparse_attention, model.sparse_share) == ("wan", True, 0.25)
    assert (model.sparse_share_step, model.sparse_share_interval) == (0.25, 7)
    for theirs in (growth, ["VSA_sparsity=0", *growth]):
        config, notes = run_and_notes(theirs)
        assert config == run_config() and all("read, not used" in note for note in notes)
