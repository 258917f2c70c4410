"""A run's settings and weights of a Diffusers folder, without an import."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from dit.checkpoint_paths import CheckpointError
from dit.codecs.vae import CODECS
from dit.config import Precision, RunConfig
from dit.config_loading import ConfigError, load_config
from dit.convert.cli import main
from dit.convert.errors import ConvertError
from dit.convert.import_ import import_weights
from dit.convert.load_hf.settings import open_hf_weights
from dit.convert.load_hf.start import fill_from_diffusers, hf_start, origin_of
from dit.models.registry import families, family_of, is_distilled
from dit.train.checkpoint.state_dict import load_weights
from dit.train.model_and_optimizer import randomise
from recipes.runs import dit_debug, dit_xl, for_weights
from tests.families.dit import PROJECTED, publish, random_model
from tests.families.flux import random_flux
from tests.families.flux2 import random_flux2
from tests.families.hidream import random_hidream
from tests.families.wan import publish_wan, random_wan
from tests.families.zimage import random_zimage

ROOT = Path(__file__).resolve().parents[3]
COSMOS = {
    "max_size": (8, 40, 40),
    "extra_pos_embed_type": "learnable",
    "concat_padding_mask": True,
    **PROJECTED,
}
KINDS = {
    "cosmos": lambda folder: publish(folder, random_model(**COSMOS), max_shard_size="40KB"),
    "cosmos in bf16": lambda folder: publish(folder, random_model(**COSMOS).bfloat16()),
    "flux": lambda folder: publish_wan(folder, random_flux()),
    "wan": lambda folder: publish_wan(folder, random_wan()),
    "wan i2v": lambda folder: publish_wan(
        folder, random_wan(in_channels=12, image_dim=10, added_kv_proj_dim=48)
    ),
}


def run_of(folder: Path, *words: str) -> RunConfig:
    words = (f"checkpoint.load_hf={folder}", "checkpoint.save=null", *words)
    return load_config(dit_debug(), overrides=words, adapt=for_weights)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_an_import(groups, tmp_path, kind, precision):
    source = KINDS[kind](tmp_path / "hf")
    imported = import_weights(source, tmp_path / "ours")
    config = run_of(source, f"model.precision={precision}")
    assert replace(config.model, precision=imported.config.model.precision) == replace(
        imported.config.model, **_layout(config)
    )
    network = family_of(config.model).network()
    one, two = (network(config.model, groups, None) for _ in range(2))
    randomise(one, seed=5)
    randomise(two, seed=6)
    load_weights(imported.path, [two], groups, averaged=False)
    start = hf_start(config)
    assert start is not None
    start.fill(one)
    theirs = dict(two.named_parameters())
    for name, value in one.named_parameters():
        assert torch.equal(value, theirs[name]), name


def _layout(config: RunConfig) -> dict:
    """What the recipe decides and no folder."""
    return {"init_method_std": config.model.init_method_std}


def test_settings_come_from_the_folder(tmp_path):
    """Of a pipeline's scheduler and of the boundary between two transformers, too."""
    wan = tmp_path / "pipeline" / "transformer_2"
    publish_wan(wan, random_wan())
    index = {"_class_name": "WanPipeline", "boundary_ratio": 0.875}
    index |= {name: ["diffusers", "X"] for name in ("transformer", "transformer_2")}
    (tmp_path / "pipeline" / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "pipeline" / "scheduler").mkdir()
    (tmp_path / "pipeline" / "scheduler" / "scheduler_config.json").write_text(
        json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    )
    config = run_of(wan, "train.eval_interval=0")
    assert config.model.family == "wan" and config.model.hidden_size == 48
    assert config.model.text_pad_to == 512
    assert config.objective.name == "flow" and config.objective.flow_shift == 3
    assert config.objective.level_range == (0, 0.875)
    other = run_of(wan, "objective.flow_shift=5", "objective.level_range=null")
    assert other.objective.flow_shift == 5
    assert other.objective.level_range is None


def test_a_distilled_network_says_so_and_another_mask_is_refused(tmp_path, capsys):
    """By the index of its pipeline; config.json and tensors are those of the base."""
    place = tmp_path / "klein"
    random_flux2(guidance_embeds=False).save_pretrained(place / "transformer")
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).save_pretrained(place / "scheduler")

    def index(name: str, **told: Any) -> None:
        index = {"_class_name": name, "transformer": ["diffusers", "X"], **told}
        (place / "model_index.json").write_text(json.dumps(index))

    said = "distilled to few steps, which plain tuning undoes"
    command = ["import", "--hf-path", str(place), "--megatron-path"]
    for distilled in (False, True):
        index("Flux2KleinPipeline", is_distilled=distilled)
        start = hf_start(run_of(place, "dataset.task_encoder_seq_length=2048"))
        assert start is not None and any(said in note for note in start.notes) == distilled
        held = run_of(place, "dataset.task_encoder_seq_length=2048", "objective.cfg_target=2")
        start = hf_start(held)
        assert start is not None and not any(said in note for note in start.notes)
        assert main([*command, str(tmp_path / f"ours{distilled}")]) == 0
        assert (said in capsys.readouterr().out) == distilled
    index("Flux2KleinKVPipeline", is_distilled=True)
    with pytest.raises(
        ConvertError, match=r"a Flux2KleinKVPipeline needs .* attend only to themselves"
    ):
        run_of(place)


def test_a_size_that_was_distilled_says_so_beside_nothing_that_holds_it(tmp_path):
    """No pipeline of FLUX.1 or of Z-Image says so."""
    random_flux(guidance_embeds=False).save_pretrained(tmp_path / "flux")
    random_zimage().save_pretrained(tmp_path / "zimage")
    random_hidream().save_pretrained(tmp_path / "hidream")
    for folder, named, held, told in (
        ("flux", "flux1_schnell", (), True),
        ("flux", "flux1_schnell", ("lora.rank=2", "lora.frozen_adapter=file"), False),
        ("flux", "custom", (), False),
        ("zimage", "zimage_turbo", (), True),
        ("zimage", "zimage", (), False),
        ("hidream", "hidream_i1_dev", ("dataset.task_encoder_seq_length=2048",), True),
    ):
        config = run_of(tmp_path / folder, *held)
        start = hf_start(replace(config, model=replace(config.model, name=named)))
        assert start is not None
        assert any("which plain tuning undoes" in note for note in start.notes) == told


def test_the_command_for_klein_fits_both_of_its_sizes(tmp_path):
    random_flux2(guidance_embeds=False).save_pretrained(tmp_path / "klein")
    config, *keys = CODECS["flux2_klein"].tuning
    keys += [f"checkpoint.load_hf={tmp_path / 'klein'}", f"checkpoint.save={tmp_path / 'run'}"]
    run = load_config(dit_xl(), config_file=ROOT / config, overrides=keys, adapt=for_weights)
    assert hf_start(run) is not None


def test_a_size_that_was_distilled_is_known_without_its_name():
    """A folder does not name a size: noise levels tell Z-Image-Turbo from Z-Image.

    Where both have the same, the name alone tells them apart. Others have an input of their own,
    the level at the end of a step.
    """
    for family in families():
        plain = [keys for n, keys in family.keys_of_sizes.items() if n not in family.distilled]
        for size in family.sizes:
            named = load_config(dit_xl(), overrides=[f"model.name={size}"])
            unnamed = replace(named, model=replace(named.model, name="custom"))
            told = size in family.distilled
            by_input = family.trains_step_end and family.tells_step_end(named.model)
            assert is_distilled(named.model, named.objective) == (told or by_input), size
            by_levels = told and family.keys_of_sizes[size] not in plain
            assert is_distilled(unnamed.model, unnamed.objective) == (by_levels or by_input), size


def test_keys_that_do_not_touch_the_weights_win(groups, tmp_path):
    source = KINDS["wan"](tmp_path / "hf")
    config = run_of(source, "model.text_pad_to=64", "model.recompute_granularity=full")
    start = hf_start(config)
    assert config.model.text_pad_to == 64
    assert start is not None and "model.text_pad_to=64 here and 512 there" in start.notes[1]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.num_layers=4", "model.num_layers=4 here and 2 there"),
        ("model.hidden_size=96", "model.hidden_size=96 here and 48 there"),
        ("model.num_attention_heads=2", "model.num_attention_heads=2 here and 4 there"),
        ("model.image_embed_size=10", "model.image_embed_size=10 here and None there"),
        ("model.name=wan2.1_t2v_14b", "model.num_layers=40 here and 2 there"),
    ],
)
def test_contradictions_name_the_key_and_both_values(groups, tmp_path, word, said):
    source = KINDS["wan"](tmp_path / "hf")
    config = run_of(source, word)
    with pytest.raises(ConvertError, match=r"checkpoint\.load_hf") as raised:
        hf_start(config)
    assert said in str(raised.value)


@pytest.mark.parametrize("word", ["model.family=dit", "model.name=sd3.5_medium"])
def test_another_family_is_named_with_that_of_the_folder(tmp_path, word):
    """Before any other key, which may have no meaning there: FLUX is told a guidance scale."""
    folder = KINDS["flux"](tmp_path / "hf")
    with pytest.raises(ConfigError) as raised:
        run_of(folder, word)
    family = "dit" if "dit" in word else "sd3"
    said = str(raised.value)
    assert f"{word} (command line): belongs to family {family}" in said
    assert f"checkpoint.load_hf={folder}" in said
    assert "holds weights of model.family=flux" in said and "guidance" not in said


def test_a_run_that_saves_nothing_goes_on_from_none(tmp_path, monkeypatch):
    """The recipe's own folder has a checkpoint, which `checkpoint.save=null` leaves alone."""
    monkeypatch.chdir(tmp_path)
    import_weights(publish(tmp_path / "small", random_model(num_layers=1)), Path("runs/debug"))
    folder = publish(tmp_path / "hf", random_model(num_layers=3))
    assert run_of(folder).model.num_layers == 3


def test_one_place_for_first_weights(tmp_path):
    for words in (
        ("checkpoint.load=other",),
        ("checkpoint.load=other", "checkpoint.finetune=true"),
    ):
        with pytest.raises(ConfigError, match=r"load_hf=.*load=other"):
            run_of(KINDS["wan"](tmp_path / "hf"), "checkpoint.save=new", *words)
    with pytest.raises(ConvertError, match=r"checkpoint.load_hf nowhere has neither"):
        run_of(Path("nowhere"))


def test_a_scheduler_that_says_nothing_needs_the_objective(tmp_path):
    source = KINDS["cosmos"](tmp_path / "hf")
    (source / "scheduler_config.json").write_text(json.dumps({"_class_name": "DDIMScheduler"}))
    with pytest.raises(ConvertError, match="from which the objective does not follow"):
        run_of(source)
    assert run_of(source, "objective.name=flow").objective.name == "flow"


def test_damage_is_refused(groups, tmp_path):
    network = random_wan()
    with torch.no_grad():
        network.blocks[1].ffn.net[2].weight[3, 4] = torch.nan
    config = run_of(publish_wan(tmp_path / "hf", network))
    model = family_of(config.model).network()(config.model, groups, None)
    start = hf_start(config)
    assert start is not None
    with pytest.raises(ConvertError, match=r"NaN or Inf in blocks.1.ffn.net.2.weight"):
        start.fill(model)


def test_names_left_out_keep_their_values(groups, tmp_path):
    config = run_of(KINDS["wan"](tmp_path / "hf"))
    model = family_of(config.model).network()(config.model, groups, None)
    randomise(model, seed=3)
    before = {name: value.clone() for name, value in model.named_parameters()}
    weights = open_hf_weights(tmp_path / "hf", config.model)
    fill_from_diffusers(model, weights, left_out=lambda key: "proj_out" in key)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == ("proj_out" in name), name


def test_the_digest_is_of_contents(groups, tmp_path):
    one, two = (KINDS["cosmos"](tmp_path / name) for name in ("a", "b"))
    weights = [open_hf_weights(folder, run_of(folder).model) for folder in (one, two)]
    origins = [origin_of(each.source) for each in weights]
    assert origins[0].digest == origins[1].digest
    for name, found in origins[0].files.items():
        assert found.sha256 == hashlib.sha256((one / name).read_bytes()).hexdigest()
    assert {"config.json", "diffusion_pytorch_model.safetensors.index.json"} < {*origins[0].files}
    assert len(origins[0].files) == len([*one.glob("*.safetensors"), *one.glob("*.json")])
    changed = sorted(two.glob("*.safetensors"))[0]
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    assert origin_of(weights[1].source).digest != origins[0].digest
    changed.unlink()
    with pytest.raises(CheckpointError, match=changed.name):
        origin_of(weights[1].source)
