"""Runs on projected texts: their exports have the projection of the folder that data went by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import CosmosTransformer3DModel

from dit.checkpoint_paths import MANIFEST, manifest_of, saved_config, write_manifest
from dit.convert.cli import main
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from tests.families.dit import NETWORKS, random_model
from tests.unit.convert.test_round_trip import _assert_same, _tensors


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cosmos25") / "transformer"
    random_model(**NETWORKS["2.5"]).save_pretrained(folder)
    return folder


def named(folder: Path, checkpoint: Path, place: Path | str) -> Path:
    """The checkpoint of a run whose dataset card says where the projection lies."""
    shutil.copytree(checkpoint, folder)
    card = {"text_encoder": {"name": "cosmos_predict25", "text_projection": str(place)}}
    (folder / "dataset_card.json").write_text(json.dumps(card))
    manifest = manifest_of(folder)
    assert manifest is not None
    files = {name: one for name, one in manifest.files.items() if name.endswith(".distcp")}
    (folder / MANIFEST).unlink()
    write_manifest(folder, files)
    return folder


@pytest.fixture(scope="module")
def imported(groups, theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    objective = ["objective.name=flow"]
    place = tmp_path_factory.mktemp("imported") / "ours"
    return import_weights(theirs, place, objective=objective, projected_text=True).path


def test_the_network_reads_projected_rows(imported: Path, theirs: Path) -> None:
    config = json.loads((theirs / "config.json").read_text())
    model = saved_config(imported).model
    assert model.crossattn_emb_size == config["text_embed_dim"]
    assert model.crossattn_proj_size is None and model.text_pad_to is None  # type: ignore[attr-defined]


def test_exports_have_the_projection_and_open(imported: Path, theirs: Path, tmp_path: Path) -> None:
    run = named(tmp_path / "run", imported, theirs)
    asked = ExportOptions(scheduler=False, weights=None)
    export_weights(run, tmp_path / "by_card", asked)
    given = ExportOptions(scheduler=False, text_projection=theirs)
    export_weights(imported, tmp_path / "given", given)
    for name in ("by_card", "given"):
        _assert_same(_tensors(theirs), _tensors(tmp_path / name))
        opened = CosmosTransformer3DModel.from_pretrained(tmp_path / name)
        assert opened.config.use_crossattn_projection
        for ours, own in zip(
            opened.parameters(),
            CosmosTransformer3DModel.from_pretrained(theirs).parameters(),
            strict=True,
        ):
            assert torch.equal(ours, own)
    words = ["verify", "--hf-path", str(tmp_path / "given"), "--megatron-path", str(imported)]
    words += ["--text-projection", str(theirs)]
    assert (main([*words, "--tensors-only"]), main(words)) == (0, 1)


def test_without_a_folder_it_is_an_error(imported: Path, theirs: Path, tmp_path: Path) -> None:
    run = named(tmp_path / "run", imported, tmp_path / "gone")
    options = ExportOptions(scheduler=False)
    with pytest.raises(ConvertError, match=r"dataset card: .*gone .*Give --text-projection DIR"):
        export_weights(run, tmp_path / "none", options)
    other = tmp_path / "other"
    random_model(**NETWORKS["video"]).save_pretrained(other)
    wrong = ExportOptions(scheduler=False, text_projection=other)
    with pytest.raises(ConvertError, match=r"has no crossattn_proj.0.weight and .* of \d+ numbers"):
        export_weights(run, tmp_path / "none", wrong)
    whole = import_weights(theirs, tmp_path / "whole", objective=["objective.name=flow"])
    given = ExportOptions(scheduler=False, text_projection=theirs)
    with pytest.raises(ConvertError, match="needs no text projection"):
        export_weights(whole.path, tmp_path / "none", given)
    with pytest.raises(ConvertError, match=r"--projected-text: .* has no text projection"):
        import_weights(other, tmp_path / "b", projected_text=True)
    assert not (tmp_path / "none").exists()
