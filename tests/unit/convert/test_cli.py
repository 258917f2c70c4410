"""The command line, from a published folder to a verified export."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError

import pytest
from safetensors.torch import load_file, save_file

from data_prep.writing.pack_options import byte_size as prep_bytes
from dit.config_loading import load_config
from dit.convert.cli import _bytes, main
from recipes.runs import dit_xl
from tests.families.dit import PROJECTED, publish, random_model


@pytest.fixture
def convert(groups, capsys):
    """Calls the command; returns its exit code and what it said."""

    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.mark.parametrize("changes", [{}, {"concat_padding_mask": True, **PROJECTED}])
def test_there_and_back_and_verified(convert, tmp_path, changes):
    hf = publish(tmp_path / "hf", random_model(**changes))
    ours, out = tmp_path / "ours", tmp_path / "out"
    assert convert("import", "--hf-path", hf, "--megatron-path", ours, "--text-pad-to", 16)[0] == 0
    code, said, _ = convert(
        *("export", "--megatron-path", ours, "--hf-path", out),
        *("--weights", "model", "--dtype", "fp32", "--max_shard_size", "100kB"),
    )
    assert code == 0 and "4 files" in said
    for folder in (hf, out):
        code, said, err = convert("verify", "--hf-path", folder, "--megatron-path", ours)
        assert code == 0, said + err
        assert "tensors equal bit for bit" in said and "largest difference is" in said
    imported = load_config(dit_xl(), config_file=ours / "config.yaml")
    assert imported.model.text_pad_to == 16
    again = tmp_path / "again"
    assert convert("import", "--hf-path", out, "--megatron-path", again)[0] == 0
    assert (again / "config.yaml").read_text() == (ours / "config.yaml").read_text()


def test_verify_finds_a_changed_number(convert, tmp_path):
    hf, ours = publish(tmp_path / "hf", random_model()), tmp_path / "ours"
    assert convert("import", "--hf-path", hf, "--megatron-path", ours)[0] == 0
    file = hf / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["transformer_blocks.0.attn1.to_v.weight"][3, 4] += 0.125
    save_file(tensors, file)
    code, said, err = convert("verify", "--hf-path", hf, "--megatron-path", ours)
    assert code == 1 and "differ" in err
    assert "largest difference is 0.125, in transformer_blocks.0.attn1.to_v.weight" in said
    code, said, _ = convert("verify", "--hf-path", hf, "--megatron-path", ours, "--tensors-only")
    assert code == 1 and "random samples" not in said


def test_errors_are_one_message(convert, tmp_path):
    code, out, err = convert("import", "--hf-path", tmp_path, "--megatron-path", tmp_path / "a")
    assert code == 1 and not out and err.startswith("error: ") and "config.json" in err
    code, _, err = convert("export", "--megatron-path", tmp_path, "--hf-path", tmp_path / "a")
    assert code == 1 and "holds no checkpoint" in err


def test_a_changed_checkpoint_is_not_exported(convert, tmp_path):
    hf, ours = publish(tmp_path / "hf", random_model()), tmp_path / "ours"
    assert convert("import", "--hf-path", hf, "--megatron-path", ours)[0] == 0
    file = ours / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, _, err = convert("export", "--megatron-path", ours, "--hf-path", tmp_path / "out")
    assert code == 1 and "__0_0.distcp" in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("scheduler", "name", "values"),
    [
        (
            {
                "_class_name": "EDMEulerScheduler",
                "sigma_max": 60.0,
                "final_sigmas_type": "sigma_min",
            },
            "edm",
            {"sigma_max": 60.0, "sigma_min": 0.002},
        ),
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
            "flow",
            {"flow_shift": 3.0, "timestep_scale": 1000.0},
        ),
    ],
)
def test_the_objective_is_that_of_the_scheduler(convert, tmp_path, scheduler, name, values):
    hf, ours = publish(tmp_path / "hf/transformer", random_model()).parent, tmp_path / "ours"
    (hf / "scheduler").mkdir()
    (hf / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    code, said, _ = convert("import", "--hf-path", hf, "--megatron-path", ours)
    assert code == 0 and f"objective: {name}, of {scheduler['_class_name']}" in said
    objective = load_config(dit_xl(), config_file=ours / "config.yaml").objective
    assert objective.name == name
    assert {key: getattr(objective, key) for key in values} == values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("5 gib", 5 * 2**30),
        ("1.5kB", 1500),
        ("512MiB", 2**29),
        ("100", 100),
    ],
)
def test_sizes_are_written_as_everywhere(text: str, size: int) -> None:
    assert _bytes(text) == prep_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5XB", "1e9", "5GiBs", "9" * 400])
def test_what_is_no_size_says_how_to_write_one(text: str) -> None:
    for read in (_bytes, prep_bytes):
        with pytest.raises(ArgumentTypeError, match="is not a size of at least"):
            read(text)
