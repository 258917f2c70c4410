"""Random encoders in the folders of pipelines: packed with, and copied into an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.cli.parser import main
from dit.codecs.dataset_card import read_card
from dit.codecs.rehearsal import WIDTH, write_wan
from dit.config import ObjectiveConfig, RunConfig
from dit.convert.pipeline import check_pipeline
from dit.models.registry import named_model
from recipes import rehearsal_encoders
from tests.media_files import image, video


def test_shards_have_the_sizes_of_the_published_encoders(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "models/Wan"
    assert rehearsal_encoders.main([str(folder)]) == 0
    with pytest.raises(ValueError, match="exists; give the name of a new folder"):
        rehearsal_encoders.main([str(folder)])
    video(tmp_path / "films/a.mp4", 9, size=(64, 48))
    (tmp_path / "films/a.txt").write_text("a fox runs")
    words = ["video", "--video_dir", tmp_path / "films", "--output_dir", tmp_path / "out"]
    words += ["--processor", "wan", "--model_name", folder, "--num_workers", 0, "--split", "1,0,0"]
    assert main([str(word) for word in words]) == 0
    card = read_card(tmp_path / "out")
    assert (card["latent"]["channels"], card["text_encoder"]["width"]) == (16, WIDTH)
    assert (card["latent"]["stride"], card["latent"]["temporal_stride"]) == (8, 4)
    model = named_model("wan2.1_t2v_1.3b")
    assert (model.in_channels, model.crossattn_emb_size) == (16, WIDTH)
    check_pipeline(folder, RunConfig(model=model, objective=ObjectiveConfig(name="flow")))


@pytest.mark.parametrize(
    ("processor", "width"),
    [pytest.param("flux2", 15_360, marks=pytest.mark.slow), ("flux2_klein", 7_680)],
)
def test_shards_of_flux2_have_the_sizes_of_its_encoders(tmp_path: Path, processor, width) -> None:
    folder = tmp_path / "models/FLUX.2"
    assert rehearsal_encoders.main([str(folder), "--processor", processor]) == 0
    image(tmp_path / "photos/a.png", 48, 32)
    words = ["image", "--image_dir", tmp_path / "photos", "--output_dir", tmp_path / "out"]
    words += ["--processor", processor, "--model_name", folder, "--num_workers", 0]
    words += ["--split", "1,0,0", "--missing_caption", "filename"]
    assert main([str(word) for word in words]) == 0
    card = read_card(tmp_path / "out")
    assert (card["latent"]["channels"], card["latent"]["stride"]) == (128, 16)
    assert (card["text_encoder"]["width"], card["text_encoder"]["padding"]) == (width, "keep")


def test_the_folder_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(json, "dumps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_wan(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    write_wan(tmp_path / "a")
    write_wan(tmp_path / "b")
    one, other = (
        (tmp_path / name / "vae/diffusion_pytorch_model.safetensors").read_bytes() for name in "ab"
    )
    assert one == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
