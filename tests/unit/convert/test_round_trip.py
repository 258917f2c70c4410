"""There and back, every tensor is bit for bit the same, in one file or many."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from safetensors.torch import load_file

from dit.config import Precision
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.megatron_checkpoint import StoredWeights
from dit.models.dit.model import DiT
from dit.models.registry import pairs
from dit.train.checkpoint.state_dict import load_weights
from tests.families.dit import PROJECTED, publish, random_model

EVERYTHING = {"extra_pos_embed_type": "learnable", "concat_padding_mask": True, **PROJECTED}


def _tensors(folder) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def _assert_same(some, others):
    assert some.keys() == others.keys()
    for name, value in some.items():
        assert value.dtype == others[name].dtype, name
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["10GB", "40KB"])
def test_import_then_export_is_bit_exact(groups, tmp_path, dtype, shard):
    network = random_model(**EVERYTHING, patch_size=(2, 3, 3)).to(dtype)
    source = publish(tmp_path / "hf", network, max_shard_size=shard)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard == "40KB")
    import_weights(source, tmp_path / "ours")
    size = 10**9 if shard == "40KB" else 40_000  # the other way round
    done = export_weights(tmp_path / "ours", tmp_path / "back", ExportOptions(max_shard_size=size))
    assert (done.files > 1) == (shard == "10GB")
    _assert_same(_tensors(source), _tensors(tmp_path / "back"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_then_import_is_bit_exact(groups, tmp_path, dtype):
    import_weights(publish(tmp_path / "hf", random_model(**EVERYTHING).to(dtype)), tmp_path / "a")
    export_weights(tmp_path / "a", tmp_path / "out", ExportOptions(max_shard_size=30_000))
    config = import_weights(tmp_path / "out", tmp_path / "b").config
    one, two = (StoredWeights(tmp_path / name, averaged=False) for name in "ab")
    for pair in pairs(config.model):
        assert one.dtype(pair) == two.dtype(pair) == dtype
        assert torch.equal(one.read(pair), two.read(pair))
    assert (tmp_path / "a/config.yaml").read_text() == (tmp_path / "b/config.yaml").read_text()


def test_an_export_has_a_card_with_pictures(groups, tmp_path):
    network = random_model()
    done = import_weights(publish(tmp_path / "hf", network), tmp_path / "run")
    pictures = done.path.parent.parent / "validation_generation" / done.path.name
    pictures.mkdir(parents=True)
    (pictures / "00000.png").write_bytes(b"png")
    for name in ("grid.png", "other.png"):
        (pictures / name).write_bytes(b"none of the samples")
    entries = [{"file": "00000.png", "prompt": "a <fox> | its\nhen"}]
    entries += [{"file": name, "prompt": "x"} for name in ("gone.png", "../secret.png")]
    (pictures / "samples.json").write_text(json.dumps(entries))
    folder = export_weights(tmp_path / "run", tmp_path / "out").path
    text = (folder / "README.md").read_text()
    numbers = sum(weight.numel() for weight in network.parameters())
    for part in (
        f"`CosmosTransformer3DModel`, {numbers:,} parameters",
        "## What it may be used for",
        'CosmosTransformer3DModel.from_pretrained("FOLDER"',
        "| ![](samples/00000.png) |\n| --- |\n| a &lt;fox&gt; \\| its hen |\n",
        "| `model.precision` | `fp32` |",
        "| `objective` | `edm, ln sigma ~ N(0, 1²), sigma_data 0.5` |",
    ):
        assert part in text
    assert "flow_shift" not in text  # of another objective
    assert [one.name for one in (folder / "samples").iterdir()] == ["00000.png"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_in_another_type(groups, tmp_path, dtype):
    import_weights(publish(tmp_path / "hf", random_model()), tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "back", ExportOptions(dtype=dtype))
    wanted = {name: value.to(dtype) for name, value in _tensors(tmp_path / "hf").items()}
    _assert_same(wanted, _tensors(tmp_path / "back"))


@pytest.mark.parametrize("size", [10**9, 40_000])
def test_diffusers_opens_an_export_without_a_word(groups, tmp_path, caplog, recwarn, capfd, size):
    theirs = random_model(**EVERYTHING)
    import_weights(publish(tmp_path / "hf", theirs), tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "back", ExportOptions(max_shard_size=size))
    capfd.readouterr()
    opened, info = CosmosTransformer3DModel.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(info.values()), info
    assert not caplog.records and not recwarn.list
    said = capfd.readouterr()
    assert not said.out and "warn" not in said.err.lower() and "not" not in said.err, said
    _assert_same(dict(theirs.state_dict()), dict(opened.state_dict()))


def test_a_model_that_diffusers_saved_in_bfloat16(groups, tmp_path):
    """Diffusers keeps the learnable positions in float32: the model is bfloat16 all the same."""
    whole = publish(tmp_path / "whole", random_model(**EVERYTHING))
    saved = publish(
        tmp_path / "hf", CosmosTransformer3DModel.from_pretrained(whole, torch_dtype=torch.bfloat16)
    )
    types = {tensor.dtype for tensor in _tensors(saved).values()}
    assert types == {torch.float32, torch.bfloat16}
    done = import_weights(saved, tmp_path / "ours")
    assert done.config.model.precision is Precision.BF16
    assert "most weights are stored in bfloat16; in float32: learnable" in done.precision_note
    network = DiT(done.config.model, groups)
    load_weights(done.path, [network], groups, averaged=False)
    table = _tensors(saved)["learnable_pos_embed.pos_emb_h"]
    assert torch.equal(network.positions.pos_emb_h, table.bfloat16())
    export_weights(done.path, tmp_path / "back")
    _assert_same(_tensors(saved), _tensors(tmp_path / "back"))


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp32")],
)
def test_the_precision_of_a_model_in_one_type(groups, tmp_path, dtype, precision):
    done = import_weights(publish(tmp_path / "hf", random_model().to(dtype)), tmp_path / "ours")
    assert done.config.model.precision == precision
    assert done.precision_note == f"as the weights are stored in {str(dtype)[6:]}"
