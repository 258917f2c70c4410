"""What cannot be converted is refused with its name, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from dit.checkpoint_paths import CheckpointError
from dit.config import ObjectiveConfig, ObjectiveName, Precision, RunConfig, TextPadding, Weights
from dit.config_loading import ConfigError, save_config
from dit.convert.diffusers_checkpoint import open_folder
from dit.convert.diffusers_config import model_config, objective_config
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, check_expressible, export_weights, exporter
from dit.convert.import_ import import_weights
from tests.families.chroma import random_chroma
from tests.families.dit import publish, random_model
from tests.families.flux import random_flux
from tests.families.qwen_image import random_qwen_image
from tests.hostile import damaged, json_bytes
from tests.packs import run_config, tiny_model
from tests.tables import table

NAME = "transformer_blocks.1.attn2.to_k.weight"


@pytest.fixture
def source(tmp_path) -> Path:
    return publish(tmp_path / "hf", random_model())


def _refused(source: Path, *parts: str, target: str = "ours") -> str:
    """The error of an import; nothing new is beside the source."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(ConvertError) as caught:
        import_weights(source, source.parent / target)
    assert sorted(source.parent.iterdir()) == before
    for part in parts:
        assert part in str(caught.value), caught.value
    return str(caught.value)


def _edit(folder: Path, **changes) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))


def _edit_tensors(folder: Path, edit) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def test_missing_extra_and_misshapen_tensors_are_listed(groups, source):
    def edit(tensors):
        del tensors[NAME]
        tensors["surplus.weight"] = torch.zeros(2)
        tensors["proj_out.weight"] = torch.zeros(3, 96)

    _edit_tensors(source, edit)
    _refused(source, f"has no {NAME}", "surplus.weight", "proj_out.weight of shape [3, 96]")


@pytest.mark.parametrize(("changes", "named"), table(__file__, "other_models"))
def test_models_that_are_not_ours(groups, source, changes, named):
    _edit(source, **changes)
    _refused(source, named)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 1.0}, "num_layers=1.0 should be a valid integer"),
        ({"num_layers": True}, "num_layers=true should be a valid integer"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_layers": 10**30}, "num_layers=1000000000000000000000000000000"),
        ({"patch_size": None}, "patch_size=null"),
        ({"patch_size": [1, 2]}, "patch_size.2 is missing"),
        ({"rope_scale": [2.0, 1.0]}, "rope_scale.2 is missing"),
        ({"rope_scale": [2.0, 1.0, float("nan")]}, "rope_scale.2=NaN"),
        ({"mlp_ratio": "4"}, 'mlp_ratio="4" should be a valid number'),
        ({"mlp_ratio": 1e308}, "mlp_ratio=1e+308 must be finite"),
        ({"concat_padding_mask": 1}, "concat_padding_mask=1 should be a valid boolean"),
        ({"_megatron_dit": [1]}, "_megatron_dit=[1]"),
        ({"_megatron_dit": {"text_pad_to": 1}}, "_megatron_dit.max_size is missing"),
        (
            {"_megatron_dit": {"text_pad_to": None, "max_size": [1, 2, 3], "later": 1}},
            "unknown key _megatron_dit.later",
        ),
        ({"_use_default_values": 5}, "_use_default_values=5"),
    ],
)
def test_values_of_another_type(groups, source, changes, named):
    _edit(source, **changes)
    _refused(source, str(source / "config.json"), named)


@pytest.mark.parametrize(("content", "named"), table(__file__, "schedulers"))
def test_schedulers_that_do_not_tell_the_objective(groups, source, content, named):
    file = source / "scheduler_config.json"
    file.write_text(json.dumps(content))
    said = _refused(source, str(file), named)
    if "the objective does not follow" in said:
        assert "objective.name=edm or objective.name=flow" in said
        done = import_weights(source, source.parent / "told", objective=["objective.name=flow"])
        assert done.config.objective.name == ObjectiveName.FLOW


def test_an_objective_that_is_said_counts(groups, source, tmp_path):
    words = ["objective.name=flow", "objective.flow_shift=3"]
    done = import_weights(source, tmp_path / "ours", objective=words)
    assert (done.config.objective.name, done.config.objective.flow_shift) == ("flow", 3)
    assert done.objective_note == "with objective.name=flow objective.flow_shift=3, as given"
    with pytest.raises(ConvertError, match=r"model\.num_layers=1.* takes model\.text_conditioner="):
        import_weights(source, tmp_path / "b", objective=["model.num_layers=1"])
    with pytest.raises(ConfigError, match=r"objective\.shift"):
        import_weights(source, tmp_path / "b", objective=["objective.shift=1"])


def test_what_is_said_is_of_the_network(groups, tmp_path):
    """Its guidance embedding, and whether it attends to padding."""
    source, quantized = tmp_path / "hf", {"quant_method": "bitsandbytes"}
    random_flux().save_pretrained(source)
    done = import_weights(source, tmp_path / "a", objective=["objective.guidance=3.5"])
    assert done.config.objective.guidance == 3.5
    done = import_weights(source, tmp_path / "b", objective=["objective.flow_shift=3"])
    assert (done.config.objective.guidance, done.config.objective.flow_shift) == (1, 3)
    with pytest.raises(ConvertError, match=r"--text-pad-to 512 must be `stored` or `none`"):
        import_weights(source, tmp_path / "c", text_pad_to=512)
    _edit(source, guidance_embeds=False)
    with pytest.raises(ConfigError, match=r"model.family=flux.* has no guidance embedding"):
        import_weights(source, tmp_path / "c", objective=["objective.guidance=3.5"])
    _edit(source, quantization_config=quantized)
    _refused(source, "quantization_config={'quant_method': 'bitsandbytes'}", "original weights")
    for network, padding in ((random_qwen_image(), 5), (random_chroma(), TextPadding.STORED)):
        folder = tmp_path / type(network).__name__
        network.save_pretrained(folder)
        with pytest.raises(ConvertError, match=f"text_pad_to={padding} (must be|is for families)"):
            import_weights(folder, tmp_path / "c", text_pad_to=padding)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(groups, source, value):
    def edit(tensors):
        tensors[NAME][1, 2] = value

    _edit_tensors(source, edit)
    _refused(source, "diffusion_pytorch_model.safetensors", NAME, "NaN or Inf")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "", "sub/a.safetensors"])
def test_an_index_that_leaves_its_folder(groups, tmp_path, name):
    source = publish(tmp_path / "hf", random_model(), max_shard_size="100KB")
    index = source / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    save_file({NAME: torch.zeros(1)}, tmp_path / "outside.safetensors")
    content["weight_map"][NAME] = name
    index.write_text(json.dumps(content))
    _refused(source, str(index), repr(name))


@pytest.mark.parametrize(
    "content",
    ["[1]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}', "{}"],
)
def test_an_index_of_another_form(groups, tmp_path, content):
    source = publish(tmp_path / "hf", random_model(), max_shard_size="100KB")
    index = source / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(content)
    _refused(source, str(index))


def test_a_scheduler_that_is_no_file(groups, source):
    (source / "scheduler_config.json").mkdir()
    _refused(source, str(source / "scheduler_config.json"), "is not a file")


def test_a_file_without_weights_is_named(groups, source):
    file = source / "diffusion_pytorch_model.safetensors"
    save_file({}, file)
    _refused(source, str(file), "holds no weights")


def test_nested_json_is_named(groups, source):
    (source / "config.json").write_text('{"a":' * 100_000)
    _refused(source, str(source / "config.json"), "nested too deeply")


CONFIG_JSON = {
    "_class_name": "CosmosTransformer3DModel",
    "_diffusers_version": "0.35.0",
    "_use_default_values": ["mlp_ratio"],
    "_megatron_dit": {"text_pad_to": None, "max_size": [8, 16, 16]},
    "num_layers": 2,
    "mlp_ratio": 4.0,
    "max_size": [8, 16, 16],
    "rope_scale": [1.0, 1.0, 1.0],
    "concat_padding_mask": False,
    "extra_pos_embed_type": None,
}
SCHEDULER_JSON = {"_class_name": "EDMEulerScheduler", "sigma_min": 0.1, "rho": 7.0}


@given(st.data())
def test_hostile_diffusers_folder_is_a_named_error_or_a_model(tmp_path, data):
    """config.json, scheduler and index as any bytes; the weights stay what they are."""
    folder = tmp_path / "hostile"
    folder.mkdir(exist_ok=True)
    weights = "diffusion_pytorch_model.safetensors"
    if not (folder / "part.safetensors").exists():
        save_file({"a.weight": torch.zeros(2)}, folder / "part.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": {"a.weight": "part.safetensors"}}
    files = {
        "config.json": CONFIG_JSON,
        "scheduler_config.json": SCHEDULER_JSON,
        f"{weights}.index.json": index,
    }
    broken = data.draw(st.sampled_from(sorted(files)))
    for name, content in files.items():
        text = data.draw(json_bytes(content)) if name == broken else json.dumps(content).encode()
        (folder / name).write_bytes(text)
    try:
        opened = open_folder(folder)
        told = {"precision": Precision.FP32, "text_pad_to": 512, "place": folder / "config.json"}
        model_config(opened.config, **told)
        objective_config(opened.scheduler, place=opened.scheduler_file)
    except ConvertError as error:
        assert str(folder) in str(error)
        assert len(str(error)) < 2000


@given(st.data())
def test_hostile_weights_are_a_named_error_or_tensors(tmp_path, data):
    folder, tensors = tmp_path / "hostile", {"a.weight": torch.arange(6.0), "b": torch.ones(2, 2)}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(data.draw(damaged(save(tensors))))
    try:
        opened = open_folder(folder)
        for name, header in opened.headers.items():
            assert opened.read(name).shape == header.shape
    except ConvertError as error:
        assert str(file) in str(error)


def test_all_that_is_wrong_with_a_config_is_said_at_once(groups, source):
    _edit(source, img_context_dim_in=64, brand_new=1)
    _refused(source, "img_context_dim_in=64", "brand_new")


@pytest.mark.parametrize("kept", [5, 500, -7])
def test_a_cut_file_is_named(groups, source, kept):
    file = source / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    _refused(source, str(file), "damaged")


def test_a_folder_that_is_none(groups, source, tmp_path):
    (source / "config.json").unlink()
    _refused(source, "config.json")


def test_other_formats_are_named(groups, source):
    file = source / "diffusion_pytorch_model.safetensors"
    file.rename(source / "diffusion_pytorch_model.fp16.safetensors")
    _refused(source, "variants", "save_pretrained")


def test_an_index_that_lies(groups, tmp_path):
    source = publish(tmp_path / "hf", random_model(), max_shard_size="100KB")
    index = source / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"][NAME] = next(f for f in files if f != content["weight_map"][NAME])
    index.write_text(json.dumps(content))
    _refused(source, NAME, "disagree")
    (source / files[1]).unlink()
    _refused(source, f"has no {files[1]}")


def test_types_that_cannot_lie_together(groups, source):
    _edit_tensors(source, lambda tensors: tensors.update({NAME: tensors[NAME].bfloat16()}))
    _refused(source, "bfloat16", "one dtype")


def test_a_target_that_exists_stays_as_it_is(groups, source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    _refused(source, "--megatron-path", "exists", target="there")
    import_weights(source, tmp_path / "ours")
    with pytest.raises(ConvertError, match=r"--hf-path .* exists"):
        export_weights(tmp_path / "ours", tmp_path / "there")
    assert [f.name for f in (tmp_path / "there").iterdir()] == ["file"]


def test_a_target_that_cannot_be_written(groups, source, tmp_path):
    (tmp_path / "file").touch()  # root may write anywhere but below a file
    _refused(source, "cannot be written", target="file/ours")


@pytest.mark.parametrize("way", ["import", "export"])
def test_a_full_disk_leaves_nothing(groups, source, tmp_path, way):
    import_weights(source, tmp_path / "ours")
    before = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signals = __import__("signal")
    ignored = signals.signal(signals.SIGXFSZ, signals.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ConvertError, match="cannot be written"):
            if way == "import":
                import_weights(source, tmp_path / "new")
            else:
                export_weights(tmp_path / "ours", tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signals.signal(signals.SIGXFSZ, ignored)
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_import_leaves_nothing(groups, source, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dit.convert.import_.write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_weights(source, tmp_path / "ours")
    assert os.listdir(tmp_path) == ["hf"]


def test_weights_that_a_checkpoint_does_not_have(groups, source, tmp_path):
    import_weights(source, tmp_path / "ours")
    with pytest.raises(ConvertError, match="no average"):
        export_weights(tmp_path / "ours", tmp_path / "out", ExportOptions(weights=Weights.EMA))
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export_weights(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_than_it_says(groups, source, tmp_path):
    done = import_weights(source, tmp_path / "ours")
    (done.path / "manifest.json").unlink()
    (done.path / "null_text.safetensors").touch()  # without a manifest it must be there
    for changes, said in (
        ({"num_layers": 1}, "instead of"),
        ({"crossattn_proj_size": 20}, "has no text_proj.bias"),
    ):
        other = replace(done.config, model=replace(done.config.model, **changes))
        save_config(other, done.path / "config.yaml")
        with pytest.raises(ConvertError, match=said):
            export_weights(done.path, tmp_path / "out")


def test_a_damaged_checkpoint(groups, source, tmp_path):
    done = import_weights(source, tmp_path / "ours")
    (done.path / "manifest.json").unlink()
    (done.path / "null_text.safetensors").touch()  # without a manifest it must be there
    index = (done.path / ".metadata").read_bytes()
    (done.path / ".metadata").write_bytes(index[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        export_weights(done.path, tmp_path / "out")
    (done.path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        export_weights(done.path, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (RunConfig(model=tiny_model(base_fps=30.0)), "model.base_fps=30"),
        (
            run_config(objective=ObjectiveConfig(name=ObjectiveName.FLOW, timestep_scale=1.0)),
            "objective.timestep_scale=1",
        ),
        (
            run_config(objective=ObjectiveConfig(name=ObjectiveName.FLOW, shift_base_tokens=256)),
            "objective.shift_base_tokens=256",
        ),
        (
            run_config(objective=ObjectiveConfig(name=ObjectiveName.FLOW, prediction="x")),
            "objective.prediction=x",
        ),
    ],
)
def test_runs_that_diffusers_cannot_express(config, named):
    with pytest.raises(ConvertError, match=named):
        check_expressible(config, ExportOptions())
    with pytest.raises(ConvertError, match=f"also_save_hf=true: .*{named}.* Set it to false"):
        exporter(config)
    if "objective" in named:
        check_expressible(config, ExportOptions(scheduler=False))
