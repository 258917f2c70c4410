"""Adapters between files and checkpoints: one pack of ours against single samples of Diffusers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from dit.batch import LATENTS, TEXT, LatentSample, PackedBatch, Problem
from dit.checkpoint_paths import has_adapters, saved_config
from dit.config import LoraConfig, MockGeometry, Precision, Problems, RunConfig, Weights
from dit.convert.cli import main
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights, open_stored
from dit.convert.import_ import import_weights
from dit.convert.load_hf.start import weights_of_folder
from dit.convert.lora import export_lora, import_lora, open_adapters
from dit.data.pack import pack_samples
from dit.lora.checkpoint import adapters_of
from dit.lora.factors import LoraFactors, LoraFileError, from_stored, shapes_of
from dit.lora.files import read_lora, write_lora
from dit.lora.targets import attach_adapters
from dit.models.family import InputKind
from dit.models.layers.adaptable import FROZEN, adapters_off
from dit.models.ltx2.family import SOUND_TEXT
from dit.models.patch_layout import PatchLayout
from dit.models.positions import unpack_latents
from dit.models.registry import diffusers_form, family_of, pairs
from dit.objectives.training_target import training_problem
from dit.sampling.commands.lora_option import add_adapters
from dit.sampling.validation.requests import sample_inputs
from dit.train import reference_passes, trainer
from dit.train.checkpoint.adapters import draw_adapters, load_adapted
from dit.train.checkpoint.state_dict import load_weights
from dit.train.model_and_optimizer import weight_shards
from tests.families.case import Case
from tests.families.table import CASES
from tests.lora_files import linears, merged, random_factors
from tests.quick import few_quick

# Wan first, which `make test` has. Then those of other kinds: fused matrices, a network that makes
# all modulations, layers of which the first and the last differ, grouped queries, experts.
KINDS = ("wan", "flux", "flux2", "chroma", "sd3", "lumina2", "hidream")
FAMILIES = few_quick([*KINDS, *(name for name in CASES if name not in KINDS)], 1)
# What reads no names of a family runs on each kind; by hand, EVERY_FAMILY=1 runs it on all. Losses
# of all families are compared in test_finetuning.py, and here what their adapters make.
of_each_kind = pytest.mark.parametrize(
    "made",
    FAMILIES if os.environ.get("EVERY_FAMILY") else FAMILIES[: len(KINDS)],
    indirect=True,
    scope="module",
)
LEVELS = (0.3, 0.8)
SIZES = ((1, 4, 6), (3, 2, 4))


def samples(model: Any) -> list[LatentSample]:
    rng, most = torch.Generator().manual_seed(2), diffusers_form(model).largest_latent(model)
    return [
        LatentSample(
            key=str(number),
            latent_CFHW=torch.randn(model.in_channels, *size, generator=rng)[:, : most[0]],
            text_LE=torch.randn(5 + number, model.crossattn_emb_size, generator=rng),
            fps=24.0,
            others=others(model, rng),
        )
        for number, size in enumerate(SIZES)
    ]


def others(model: Any, rng: torch.Generator) -> dict[str, Tensor]:
    """Vectors, rows of fixed number or for sounds, and a sound, of a sample of a family."""
    shapes: dict[str, tuple[int, ...]] = {}
    for one in family_of(model).inputs(model):
        if one.kind is InputKind.VECTOR:
            shapes[one.name] = (one.width,)
        elif one.kind is InputKind.SOUND:
            shapes[one.name] = (one.width, 5)
        elif one.name != TEXT and (one.rows or one.name == SOUND_TEXT):
            shapes[one.name] = (one.rows or 3, one.width)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


@torch.no_grad()
def theirs(network: Any, config: RunConfig) -> list[Tensor]:
    return said_by_theirs(network, config)


def said_by_theirs(network: Any, config: RunConfig) -> list[Tensor]:
    run, model = diffusers_form(config.model).run, config.model
    guidance = config.objective.guidance
    return [
        run(network, s, level, model, guidance=guidance)
        for s, level in zip(samples(model), LEVELS, strict=True)
    ]


def errors_of(network: Any, batch: PackedBatch, problem: Problem, config: RunConfig) -> Tensor:
    """Weighted squared errors of Diffusers' network for what is not given, sample after sample."""
    return torch.cat(sample_errors(network, batch, problem, config))


def sample_errors(
    network: Any, batch: PackedBatch, problem: Problem, config: RunConfig
) -> list[Tensor]:
    model, guidance, found = config.model, config.objective.guidance, []
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    is_target_TC = batch.is_target_T[:, None].expand_as(problem.target_TC)
    noisy, target, learned = (
        unpack_latents(x_TC, batch, **patch)
        for x_TC in (problem.input_TC, problem.target_TC, is_target_TC)
    )
    layout = PatchLayout.of(config)
    for n, latent in enumerate(noisy):
        others = {name: x.float() for name, x in sample_inputs(batch, n, layout).items()}
        told: dict[str, Any] = {"key": "", "text_LE": others.pop("text"), "others": others}
        sample = LatentSample(latent_CFHW=latent, fps=float(batch.fps_N[n]), **told)
        level = float(problem.level_M[n])
        made = diffusers_form(model).run(network, sample, level, model, guidance=guidance)
        found.append(problem.weight_N[n] * (made - target[n]).square()[learned[n]])
    return found


@torch.no_grad()
def ours(checkpoint: Path, groups: Any, files: Sequence[str] = ()) -> list[Tensor]:
    return said_by_ours(our_network(checkpoint, groups, files), saved_config(checkpoint))


def our_network(checkpoint: Path, groups: Any, files: Sequence[str] = ()) -> Any:
    model = saved_config(checkpoint).model
    network = family_of(model).network()(model, groups).eval()
    if has_adapters(checkpoint):
        at: Any = {"averaged": False, "read_folder": weights_of_folder}
        load_adapted(checkpoint, network, groups, **at)
    else:
        load_weights(checkpoint, [network], groups, averaged=False)
    add_adapters(network, files, option="--lora")
    return network


def said_by_ours(network: Any, config: RunConfig) -> list[Tensor]:
    model = config.model
    batch = pack_samples(samples(model), PatchLayout.of(config))
    made = network(batch.latent_TC, torch.tensor(LEVELS), batch)
    made_TC = made[LATENTS] if batch.others else made
    patch = {"patch_temporal": model.patch_temporal, "patch_spatial": model.patch_spatial}
    return unpack_latents(made_TC, batch, **patch)


def assert_close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, groups, tmp_path_factory):
    """A base in both forms, an adapter that peft made on Diffusers' network, and its outputs."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("made")
    network_of(case).save_pretrained(folder / "hf")
    base = import_weights(folder / "hf", folder / "base").path
    torch.manual_seed(0)
    block = "blocks" if request.param == "wan" else "transformer_blocks"
    config = PeftLoraConfig(
        r=4,
        lora_alpha=6,
        # Of q, k and v the first two have an adapter, with two ranks; and some linears outside.
        target_modules=[
            *("to_q", "to_k", "to_out.0", "net.2", "proj_out", "linear_1", *case.adapted),
        ],
        rank_pattern={"to_q": 3, f"{block}.0.{case.second_attention}.to_k": 5},
        alpha_pattern={"net.2": 1},
        init_lora_weights=False,
    )
    model = get_peft_model(network_of(case), config)
    model.save_pretrained(folder / "peft")
    import_lora(folder / "peft", base, folder / "lora")
    return case, folder, theirs(model, saved_config(base))


def network_of(case: Case) -> Any:
    """The one whose weights the base has."""
    return case.random(**case.trained)


def test_our_network_computes_what_peft_computes(made, groups) -> None:
    case, folder, wanted = made
    assert_close(ours(folder / "lora", groups), wanted)
    bare = theirs(network_of(case), saved_config(folder / "base"))
    assert (bare[0] - wanted[0]).abs().max() > 0.1
    assert_close(ours(folder / "base", groups), bare)


def test_our_folder_computes_it_in_diffusers_and_peft(made) -> None:
    case, folder, wanted = made
    config = saved_config(folder / "base")
    done = export_lora(folder / "lora", folder / "out", base_model="Org/Base")
    assert len(done.factors) == len(read_lora(folder / "peft"))
    network = network_of(case)
    network.load_lora_adapter(folder / "out", prefix="transformer", use_safetensors=True)
    assert_close(theirs(network, config), wanted)
    network.fuse_lora()
    assert_close(theirs(network, config), wanted)
    model = PeftModel.from_pretrained(network_of(case), str(folder / "out"))
    # No linear beside them has an adapter, such as another one that ends in `proj_out`.
    adapted = {name for name, _ in model.named_modules() if name.endswith("lora_A")}
    assert adapted == {f"base_model.model.{name}.lora_A" for name in done.factors}
    assert_close(theirs(model, config), wanted)
    assert_close(theirs(model.merge_and_unload(), config), wanted)
    card = (folder / "out" / "README.md").read_text()
    assert "Org/Base" in card
    assert "| `lora.rank` | `4` |" in card
    # ComfyUI reads Diffusers' names of FLUX; of HunyuanVideo it has q, k and v as one, and here v
    # has no adapter.
    assert (folder / "out" / "comfyui" / "lora.safetensors").is_file() == case.comfyui


@of_each_kind
def test_merged_weights_compute_it_without_an_adapter(made) -> None:
    case, folder, wanted = made
    options = ExportOptions(merged=True, scheduler=False)
    export_weights(folder / "lora", folder / "merged", options)
    network = case.network.from_pretrained(folder / "merged")
    assert_close(theirs(network, saved_config(folder / "base")), wanted)


def test_a_round_trip_keeps_the_factors(made) -> None:
    _, folder, _ = made
    read, opened = read_lora(folder / "peft"), open_adapters(folder / "lora")
    assert opened.weights is Weights.MODEL
    assert opened.factors.keys() == read.keys()
    for name, one in opened.factors.items():
        assert torch.equal(one.down, read[name].down)
        assert torch.equal(one.up, read[name].up)
        assert one.alpha == read[name].alpha


@of_each_kind
def test_commands(made, capsys) -> None:
    case, folder, _ = made
    place = ["--megatron-path", str(folder / "lora"), "--hf-path"]
    assert main(["export-lora", *place, str(folder / "a")]) == 0
    assert ("no file for ComfyUI" in capsys.readouterr().out) != case.comfyui
    told = ["--hf-path", str(folder / "a"), "--base-path", str(folder / "base")]
    assert main(["import-lora", *told, "--megatron-path", str(folder / "again")]) == 0
    assert "checkpoint.finetune=true" in capsys.readouterr().out
    assert main(["export", *place, str(folder / "b"), "--merged", "--no-scheduler"]) == 0
    assert main(["export", *place, str(folder / "c")]) == 1
    assert "holds only adapters" in capsys.readouterr().err
    place[1] = str(folder / "base")
    assert main(["export-lora", *place, str(folder / "c")]) == 1
    assert "no adapters" in capsys.readouterr().err
    told[1] = str(folder / "hf")
    assert main(["import-lora", *told, "--megatron-path", str(folder / "c")]) == 1
    assert re.search("not a key of LoRA|only weights have adapters", capsys.readouterr().err)
    (texts := folder / "with_text").mkdir()
    tensors = load_file(folder / "a" / "pytorch_lora_weights.safetensors")
    tensors["text_encoder.layers.0.q_proj.lora_A.weight"] = torch.ones(2, 2)
    save_file(tensors, texts / "x.safetensors")
    told = ["--hf-path", str(texts), "--base-path", str(folder / "base")]
    told += ["--megatron-path", str(folder / "d")]
    assert main(["import-lora", *told]) == 1
    assert "Leave such keys out with --ignore_text_encoder" in capsys.readouterr().err
    assert main(["import-lora", *told, "--ignore-text-encoder"]) == 0
    assert f"1 of {len(tensors)} keys are of text encoders" in capsys.readouterr().out
    told = ["--hf-path", str(folder / "a"), "--base-path", str(folder / "a")]
    assert main(["import-lora", *told, "--megatron-path", str(folder / "c")]) == 1
    assert "holds no whole weights; give the Diffusers folder" in capsys.readouterr().err
    assert not (folder / "c").exists()


@of_each_kind
def test_beside_a_diffusers_folder(made, groups, tmp_path: Path) -> None:
    """It is the base as it is: nobody imports it first."""
    case, folder, wanted = made
    hf = Path(shutil.copytree(folder / "hf", tmp_path / "hf"))
    import_lora(folder / "peft", hf, folder / "beside")
    said = adapters_of(folder / "beside")
    assert said is not None and said.base.diffusers and said.base.path == hf
    one, other = (saved_config(folder / name) for name in ("beside", "lora"))
    assert one == other
    assert_close(ours(folder / "beside", groups), wanted)
    options = ExportOptions(merged=True, scheduler=False)
    export_weights(folder / "beside", tmp_path / "merged", options)
    network = case.network.from_pretrained(tmp_path / "merged")
    assert_close(theirs(network, saved_config(folder / "base")), wanted)
    (hf / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match=r"config\.json"):
        import_lora(folder / "peft", hf, folder / "x")


@of_each_kind
def test_adapters_of_another_network_and_no_base(made, tmp_path: Path) -> None:
    case, folder, _ = made
    other = next(one for one in CASES.values() if one is not case)
    network_of(other).save_pretrained(folder / "hf2")
    import_weights(folder / "hf2", folder / "base2")
    with pytest.raises(LoraFileError, match="is of another network"):
        import_lora(folder / "peft", folder / "base2", folder / "x")
    with pytest.raises(ConvertError, match="holds no whole weights"):
        import_lora(folder / "peft", folder / "lora", folder / "x")


def test_merging_keeps_the_stored_type_and_what_has_no_adapter(groups, tmp_path: Path) -> None:
    case = CASES["wan"]
    network_of(case).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    base = import_weights(tmp_path / "hf", tmp_path / "base").path
    name = "blocks.1.attn1.to_k"
    config = PeftLoraConfig(r=2, lora_alpha=1, target_modules=[name], init_lora_weights=False)
    get_peft_model(network_of(case), config).save_pretrained(tmp_path / "peft")
    import_lora(tmp_path / "peft", base, tmp_path / "lora")
    export_weights(
        tmp_path / "lora", tmp_path / "merged", ExportOptions(merged=True, scheduler=False)
    )
    before = case.network.from_pretrained(tmp_path / "hf", torch_dtype=torch.bfloat16)
    after = case.network.from_pretrained(tmp_path / "merged", torch_dtype=torch.bfloat16)
    (one,) = read_lora(tmp_path / "peft").values()
    for key, value in after.state_dict().items():
        old = before.state_dict()[key]
        if key == f"{name}.weight":
            old = (old.float() + one.product()).bfloat16()
        assert torch.equal(value, old), key
    stored, _, _ = open_stored(base, None)
    assert {stored.dtype(pair) for pair in pairs(saved_config(base).model)} == {torch.bfloat16}


def product_of(file: Path, scale: float, model: Any) -> dict[str, Any]:
    read = read_lora(file, model)
    return {name: replace(one, alpha=one.alpha * scale) for name, one in read.items()}


@of_each_kind
def test_several_adapters_beside_a_network_that_generates(made, groups, tmp_path: Path) -> None:
    """Sums with scales; scale 0 is the base bit for bit."""
    case, folder, _ = made
    config = saved_config(folder / "base")
    second = random_factors(linears(network_of(case)), ranks={"to_k": 2}, seed=7)
    (tmp_path / "b").mkdir()
    write_lora(tmp_path / "b", second)
    first, other = str(folder / "peft"), str(tmp_path / "b")
    network = merged(network_of(case), product_of(folder / "peft", 0.5, config.model))
    wanted = theirs(merged(network, product_of(tmp_path / "b", -0.25, config.model)), config)
    assert_close(ours(folder / "base", groups, (f"{first}:0.5", f"{other}:-0.25")), wanted)
    bare = ours(folder / "base", groups)
    for given in ((), (f"{first}:0", f"{other}:0.0")):
        got = ours(folder / "base", groups, given)
        assert all(torch.equal(one, two) for one, two in zip(got, bare, strict=True))
    # Beside a checkpoint of adapters, too.
    network = merged(network_of(case), product_of(folder / "peft", 1.0, config.model))
    wanted = theirs(merged(network, product_of(tmp_path / "b", -0.25, config.model)), config)
    assert_close(ours(folder / "lora", groups, (f"{other}:-0.25",)), wanted)
    with pytest.raises(ValueError, match="'much' is not a number"):
        ours(folder / "base", groups, (f"{first}:much",))
    with pytest.raises(LoraFileError, match="does not exist"):
        ours(folder / "base", groups, (str(folder / "none"),))


def test_a_trained_and_a_frozen_adapter_are_those_of_peft(made, groups, tmp_path: Path) -> None:
    """Outputs and gradients of both together, and of the trained one where the other is off."""
    case, folder, _ = made
    config = saved_config(folder / "base")
    model = PeftModel.from_pretrained(network_of(case), str(folder / "peft"), is_trainable=True)
    torch.manual_seed(5)
    beside = {"r": 2, "lora_alpha": 5, "target_modules": ["to_q", "to_v", "net.2", "linear_1"]}
    model.add_adapter(FROZEN, PeftLoraConfig(**beside, init_lora_weights=False))
    model.save_pretrained(tmp_path, selected_adapters=[FROZEN])
    model.train()  # without it, experts have no gradients there
    network = our_network(folder / "lora", groups)
    frozen = read_lora(tmp_path / FROZEN)
    attach_adapters(network, shapes_of(frozen), precision=Precision.FP32, adapter=FROZEN)
    draw_adapters(network, frozen, adapter=FROZEN)
    alone = ours(folder / "lora", groups)
    for on in (["default", FROZEN], ["default"]):
        with adapters_off(network, [] if FROZEN in on else [FROZEN]):
            got, slopes = gradients_of(network, said_by_ours(network, config), folder / "lora")
        model.base_model.set_adapter(on)
        model.zero_grad()
        wanted = said_by_theirs(model, config)
        sum(one.square().mean() for one in wanted).backward()
        assert_close(got, [one.detach() for one in wanted])
        for module, one in slopes.items():
            linear = model.base_model.model.get_submodule(module)
            for ours_of, theirs_of in ((one.down, linear.lora_A), (one.up, linear.lora_B)):
                slope = theirs_of["default"].weight.grad
                if slope is None:  # of the last layer's text, which nothing reads
                    assert not ours_of.any(), module
                    continue
                # Of scores, where differences of large numbers are left, rounding leaves 3e-5.
                assert (ours_of - slope).abs().max() <= 1e-4 * slope.abs().max(), module
        is_alone = all(torch.equal(a, b) for a, b in zip(got, alone, strict=True))
        assert is_alone == (FROZEN not in on)
    assert not [p for n, p in network.named_parameters() if FROZEN in n and p.grad is not None]


def gradients_of(
    network: Any, said: list[Tensor], checkpoint: Path
) -> tuple[list[Tensor], dict[str, LoraFactors]]:
    """What was said, and the gradients of A and B by Diffusers' modules; zeros of unread ones."""
    network.zero_grad()
    sum(one.square().mean() for one in said).backward()
    data = {one.key: one.data for one in weight_shards(network)}
    stored = {key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in data.items()}
    run = adapters_of(checkpoint)
    assert run is not None
    slopes = from_stored(run.adapters, network.model, stored.__getitem__)
    return [one.detach() for one in said], slopes


@of_each_kind
def test_training_goes_on_from_the_loss_of_diffusers_network(made, groups, monkeypatch) -> None:
    """The same packs, noise and levels; the file's ranks rule."""
    case, folder, _ = made
    config = config_of(case, folder)
    values, seen = a_step_of(config, monkeypatch)
    model = PeftModel.from_pretrained(network_of(case), str(folder / "peft"))
    with torch.no_grad():
        wanted = torch.cat([errors_of(model, *one, config) for one in seen]).mean()
    assert values["loss"] == pytest.approx(float(wanted), rel=1e-5)
    wrong = replace(config, lora=replace(config.lora, rank=9))
    with pytest.raises(
        Problems, match=r"lora\.rank=9 differs from the adapters of lora\.init_from"
    ):
        a_step_of(wrong, monkeypatch)


def config_of(case: Case, folder: Path) -> RunConfig:
    """A run on mock samples, from peft's adapters."""
    saved, frames = saved_config(folder / "base"), max(grid[0] for grid in case.grids)
    return replace(
        saved,
        checkpoint=replace(saved.checkpoint, load=str(folder / "base"), finetune=True),
        dataset=replace(
            saved.dataset,
            mock=True,
            task_encoder_seq_length=256,
            mock_samples=(MockGeometry(frames=frames, height=4, width=6, text_length=9),),
        ),
        lora=LoraConfig(init_from=str(folder / "peft")),
    )


def a_step_of(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The values of a step, and the packs and problems that it was made of."""
    seen: list[Any] = []

    def recorded(*given: Any, **options: Any) -> Any:
        seen.append(training_problem(*given, **options))
        return seen[-1]

    monkeypatch.setattr(reference_passes, "training_problem", recorded)
    told: Any = {"warm_up": 0, "steps": 1, "read_folder": weights_of_folder}
    (values,) = trainer.measure_steps(config, around=nullcontext(), **told)
    return values, seen
