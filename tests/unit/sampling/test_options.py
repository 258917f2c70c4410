"""Options of `generate_dit.py` from a YAML file, and its default of guidance."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dit.command_line import chosen
from dit.config_loading import load_config
from dit.sampling.commands.generate_media import options_of_network
from dit.sampling.commands.lora_option import scaled_file
from dit.sampling.commands.options import GenerationOptions, parser
from dit.sampling.commands.options_file import with_file
from dit.sampling.validation.samples import settings_of
from recipes.runs import RECIPES
from tests.hostile import damaged, mistaken
from tests.tables import table

OURS = table(__file__, "ours")
AUTOMODEL = table(__file__, "automodel")


@pytest.fixture
def parse(tmp_path: Path):
    def call(text: str, *argv: str):
        file = tmp_path / "generate.yaml"
        file.write_text(text)
        options = parser()
        return options.parse_args(with_file(["--config", str(file), *argv], options))

    return call


def test_paths_of_a_file_are_read_as_on_the_command_line(
    parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    args = parse("{checkpoint_path: ~/runs/x, prompt: x, output_dir: ~/a:b, reference: [~/r.png]}")
    assert (args.checkpoint_path, args.output_dir) == ("/users/me/runs/x", Path("/users/me/a:b"))
    assert args.reference == ["/users/me/r.png"]
    with pytest.raises(ValueError, match=r"--output_dir.*s3://b/x is an address"):
        parse("{checkpoint_path: runs/x, prompt: x, output_dir: s3://b/x}")


@pytest.mark.parametrize(
    ("text", "argv", "said"),
    [
        ("prompt: x", ["--stg-mode=residual"], "--stg-mode=residual: a choice of spatio-temporal"),
        (
            "prompt: x",
            ["--cfg_star_rescale"],
            r"--cfg_star_rescale: cfg\* exists only in Lightricks' own",
        ),
        # As in its configurations of 0.9.7 and 0.9.8.
        ("pipeline_type: multi-scale\nstg_mode: residual", [], r"stg_mode \(.*:2\): a choice of"),
        ("first_pass: {skip_block_list: [19]}", [], r"skip_block_list \(.*:1\): spatio-temporal"),
        (
            "second_pass:\n  cfg_star_rescale: true",
            [],
            r"cfg_star_rescale \(.*:1\): cfg\* exists only in",
        ),
    ],
)
def test_what_only_lightricks_pipeline_has_is_refused_by_name(
    parse, text: str, argv: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        parse(text, *argv)
    assert "leave it out, and use --guidance" in str(raised.value)


def test_scales_of_adapters_and_colons_in_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wan:lora").mkdir()
    for text, file, scale in (
        ("wan:lora", "wan:lora", 1.0),
        ("wan:lora:0.5", "wan:lora", 0.5),
        ("nothing:0.5", "nothing", 0.5),
        ("wan:nothing", "wan:nothing", 1.0),
        ("nothing", "nothing", 1.0),
    ):
        assert scaled_file(text, option="--lora") == (Path(file), scale)
    with pytest.raises(ValueError, match="'0,5' is not a number; write FILE:SCALE"):
        scaled_file("wan:lora:0,5", option="--lora")
    with pytest.raises(
        ValueError, match=r"--lora wan:lora:1e39: the scale 1e39 must lie in \[-1000, 1000\]"
    ):
        scaled_file("wan:lora:1e39", option="--lora")


def test_options_by_name(parse) -> None:
    args = parse(OURS)
    assert (args.checkpoint_path, args.prompt) == ("runs/x", ["a red square", "-a dash"])
    assert (args.num_steps, args.output_dir) == (12, Path("out"))
    assert (args.save_latents, args.sequence_parallel, args.t5_cache_dir) == (True, False, None)
    assert chosen(GenerationOptions, args).guidance_interval == (0.1, 5)


@pytest.mark.parametrize(
    "name",
    [
        *("guidance_rescale", "guidance_steps", "guidance_least_norm", "reference_guidance"),
        "guidance_after",
    ],
)
def test_a_guider_has_guidance_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"--guider models .* leave out --{name}"):
        GenerationOptions(guider=Path("models"), **{name: 0.5})


def test_the_command_line_is_stronger(parse) -> None:
    args = parse(OURS, "--num_steps", "3", "--prompts_file", "p.txt", "--guidance=2")
    assert (args.num_steps, args.prompt, args.guidance) == (3, None, 2)


def test_automodels_file(parse, capsys) -> None:
    args = parse(AUTOMODEL)
    assert (args.checkpoint_path, args.prompt, args.seed) == ("runs/x", ["A cat"], 42)
    assert (args.num_steps, args.guidance, args.height, args.fps) == (50, 5.0, 480, 16)
    assert (args.num_video_frames, args.output_dir) == (81, Path("outputs"))
    said = capsys.readouterr().err
    for key in ("model.pretrained_model_name_or_path", "inference.dtype", "vae.enable_tiling"):
        assert f"{key} (" in said
    args = parse(AUTOMODEL, "--model.checkpoint", "LATEST", "--inference.guidance_scale=2")
    assert (args.checkpoint_path, args.guidance) == ("LATEST", 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_step: 3", ":1: unknown key; did you mean num_steps?".replace(":1: ", ":1): ")),
        ("checkpoint_path: x\nheight: '32'", 'height="32" ('),
        ("height: true", "must be an integer"),
        ("guidance: high", "must be a number"),
        ("prompt: 7", "must be text"),
        ("guidance_interval: 3", "must be a list of two values"),
        ("guidance_interval: [1]", "must be a list of 2 values"),
        ("save_latents: 1", "must be true or false"),
        ("output_dir: [a, b]", "must be one value"),
        ("- a", "must be a mapping"),
        ("a: [", "generate.yaml:1: "),
        ("help: true", "unknown key"),
    ],
)
def test_what_is_wrong_names_file_and_key(parse, text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert "generate.yaml" in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.yaml: cannot be read .*; check --config"):
        with_file(["--config", str(tmp_path / "none.yaml")], parser())


@given(
    content=st.sampled_from([OURS, AUTOMODEL]).flatmap(lambda text: damaged(text.encode()))
    | st.sampled_from([OURS, AUTOMODEL])
    .flatmap(lambda text: mistaken(yaml.safe_load(text)))
    .map(lambda value: yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass"))
)
def test_hostile_generation_file(tmp_path_factory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "generate.yaml"
    file.write_bytes(content)
    options = parser()
    try:
        options.parse_args(with_file(["--config", str(file)], options))
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("file", "overrides", "asked", "used"),
    [
        ("dit_debug", [], None, 2.5),
        ("dit_debug", [], 4.0, 4.0),
        ("dit_debug", ["validation.guidance=6"], None, 6.0),
        ("dit_debug", ["validation.guidance=6"], 1.0, 1.0),
        ("flux_debug", [], None, 1.0),  # the network is told a scale
        ("flux_debug", ["validation.guidance=3"], None, 3.0),
    ],
)
def test_guidance_is_that_of_the_run_unless_given(
    repo_root: Path, file: str, overrides: list[str], asked: float | None, used: float
) -> None:
    place = repo_root / f"conf/{file}.yaml"
    config = load_config(RECIPES["dit_xl"](), config_file=place, overrides=overrides)
    opened: Any = SimpleNamespace(config=config, path=Path("run"))
    options = GenerationOptions(guidance=asked)
    assert options_of_network(options, opened).guidance == used
    assert settings_of(config).guidance == config.guidance  # of validation
    if asked is None:
        assert config.guidance == used
