"""Samples go to the formats of other tools and come back; those tools' own loading opens them."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset

from data_prep.cli.parser import main
from dit.codecs.pretrained import load
from tests import tiny_pipelines
from tests.media_files import image, video


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipelines.wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture
def films(tmp_path: Path) -> Path:
    for index in range(5):
        video(tmp_path / f"in/clip_{index}.mp4", 9 + 4 * (index % 2))
    return tmp_path / "in"


def run(films: Path, out: Path, wan: Path, form: str) -> int:
    words = ["video", "--video_dir", films, "--output_dir", out, "--processor", "wan"]
    words += ["--model_name", wan, "--workload_type", "i2v", "--num_workers", 0]
    words += ["--output_format", form, "--split", "0.7,0.3,0"]
    return main([str(word) for word in words])


@pytest.mark.parametrize("form", ["meta", "pt", "parquet", "dfm"])
def test_there_and_back(form: str, films: Path, wan: Path, tmp_path: Path, read_samples) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    assert run(films, out, wan, form) == 0
    assert run(films, out, wan, form) == 0  # and again, where all is there
    source = {"parquet": out / "combined_parquet_dataset", "dfm": out / "dfm_shards"}.get(form, out)
    words = ["convert", source, "--output_dir", back, "--split", "0.7,0.3,0"]
    words += ["--processor", "wan", "--model_name", wan]
    assert main([str(word) for word in words]) == 0
    before, after = read_samples(out), read_samples(back)
    assert set(before) == set(after) and len(after) == 5
    for name, sample in after.items():
        assert torch.equal(sample["latent"], before[name]["latent"])
        assert torch.equal(sample["text"], before[name]["text"])
        for field in ("caption", "height", "width", "num_frames", "fps"):
            assert sample[field] == pytest.approx(before[name][field]), field
    assert (back / ".nv-meta/dataset.yaml").exists()


def test_automodel_opens_what_was_written(films: Path, wan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(films, out, wan, "meta") == 0
    index = json.loads((out / "metadata.json").read_text())
    assert index["total_items"] == 5 and index["model_type"] == "wan"
    rows = json.loads((out / index["shards"][0]).read_text())
    assert len(rows) == 5
    for row in rows:
        content = torch.load(row["cache_file"], weights_only=True)
        assert content["video_latents"].shape[:2] == (1, 16)
        assert content["text_embeddings"].shape[:2] == (1, 512)  # so that texts stack
        assert Path(row["cache_file"]).parent == out / "64x48" and row["bucket_resolution"] == [
            64,
            48,
        ]


def test_pyarrow_opens_what_was_written(films: Path, wan: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out"
    assert run(films, out, wan, "parquet") == 0
    table = parquet.read_table(out / "combined_parquet_dataset")
    names = {"id", "file_name", "caption", "width", "height", "num_frames", "fps", "media_type"}
    tensors = ("vae_latent", "text_embedding", "clip_feature", "first_frame_latent")
    names |= {f"{tensor}_{part}" for tensor in tensors for part in ("bytes", "shape", "dtype")}
    assert names <= set(table.column_names) and len(table) == 5
    row = table.to_pylist()[0]
    values = np.frombuffer(row["vae_latent_bytes"], np.float32).reshape(row["vae_latent_shape"])
    assert values.shape[0] == 16 and row["num_frames"] == values.shape[1]


def test_dfm_shards_with_padding_raw_latents_and_a_bomb(
    tmp_path: Path, read_samples, capsys
) -> None:
    """As DFM's FLUX preparation writes them; a pickle that runs code is refused, not run."""
    folder, flux = tmp_path / "in", tiny_pipelines.flux(tmp_path / "flux")
    folder.mkdir()
    latent = torch.randn(4, 8, 8)
    text = torch.cat([torch.randn(7, 16), torch.zeros(505, 16)])
    words = {"prompt_embeds": text, "pooled_prompt_embeds": torch.randn(8)}

    class Bomb:
        def __reduce__(self):
            return print, ("boom",)

    with webdataset.ShardWriter(str(folder / "rank0-%06d.tar"), verbose=0) as shards:
        for index, content in enumerate((words, words, Bomb())):
            saved = io.BytesIO()
            if isinstance(content, Bomb):
                pickle.dump(content, saved)
            else:
                torch.save(content, saved)
            pth = io.BytesIO()
            torch.save(latent, pth)
            about = json.dumps({"image_height": 1}).encode()
            parts = {"pth": pth.getvalue(), "pickle": saved.getvalue(), "json": about}
            shards.write({"__key__": f"{index:06d}", **parts})
    options = ["--processor", "flux", "--model_name", flux, "--latents", "raw"]
    options += ["--split", "1,0,0", "--max_bad_fraction", 0.5, "--output_dir", tmp_path / "out"]
    assert main(["convert", str(folder), *map(str, options)]) == 0
    said = capsys.readouterr().out
    assert "boom" not in said and "refused: 1 x file cannot be read" in said
    samples = list(read_samples(tmp_path / "out").values())
    assert len(samples) == 2
    expected = (latent[:, None] - 0.1159) * 0.3611
    assert (samples[0]["latent"].float() - expected).abs().max() < 2e-3
    assert samples[0]["text"].shape == (7, 16) and samples[0]["pooled_text"].shape == (8,)
    with tarfile.open(next((tmp_path / "out").rglob("*.tar"))) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".pth", ".pickle"))]


def saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def test_ranks_that_count_alike_and_samples_of_another_model(
    tmp_path: Path, read_samples, capsys
) -> None:
    folder, about = tmp_path / "in", b"{}"
    folder.mkdir()
    for rank in range(2):
        with webdataset.ShardWriter(str(folder / f"rank{rank}-%06d.tar"), verbose=0) as shards:
            for index in range(2):
                latent, text = torch.full((4, 1, 4, 4), rank + 0.5), torch.ones(3, 16)
                parts = {"pth": saved(latent), "pickle": saved(text), "json": about}
                shards.write({"__key__": f"{index:06d}", **parts})
    other = {"pth": saved(torch.ones(16, 1, 4, 4)), "pickle": saved(torch.ones(3, 16))}
    broken = {"pth": saved(torch.ones(4, 1, 4, 4)), "pickle": saved(torch.ones(3, 16))}
    listed = {"pth": saved([1]), "pickle": saved({"prompt_embeds": 3}), "json": about}
    with webdataset.ShardWriter(str(folder / "rank2-%06d.tar"), verbose=0) as shards:
        shards.write({"__key__": "000000", **other, "json": about})
        shards.write({"__key__": "000001", **broken, "json": b"{not json"})
        shards.write({"__key__": "000002", **listed})
    words = ["convert", str(folder), "--output_dir", str(tmp_path / "out"), "--split", "1,0,0"]
    assert main([*words, "--max_bad_fraction", "0.2"]) == 1
    assert "3 of 7 files were refused" in capsys.readouterr().err
    words += ["--max_bad_fraction", "0.5", "--license", "CC0-1.0"]
    assert main([*words, "--text_encoder", "bytes"]) == 0  # no --overwrite after a failure
    said = capsys.readouterr().out
    assert "refused: 1 x sample is of another model" in said
    assert "refused: 2 x file cannot be read" in said
    samples = read_samples(tmp_path / "out")
    assert sorted((s["key"], float(s["latent"].mean())) for s in samples.values()) == [
        ("000000", 0.5), ("000000-2", 1.5), ("000001", 0.5), ("000001-2", 1.5)
    ]  # fmt: skip
    card = json.loads((tmp_path / "out/dataset_card.json").read_bytes())
    assert card["license"] == "CC0-1.0" and card["text_encoder"]["name"] == "bytes"


def test_a_damaged_index_is_named(films: Path, wan: Path, tmp_path: Path, capsys) -> None:
    out, back = tmp_path / "out", str(tmp_path / "back")
    assert run(films, out, wan, "meta") == 0
    (rows,) = out.glob("metadata_shard_*.json")
    items = json.loads(rows.read_bytes())
    del items[0]["cache_file"], items[1]["bucket_resolution"]
    rows.write_text(json.dumps(items))
    words = ["convert", str(out), "--output_dir", back, "--split", "1,0,0"]
    assert main([*words, "--max_bad_fraction", "0.5"]) == 0
    assert "refused: 2 x file cannot be read" in capsys.readouterr().out
    refused = (tmp_path / "back/refused.jsonl").read_text()
    assert '"metadata_shard_0000.json, item 0"' in refused and "cache_file=None" in refused
    assert "bucket_resolution=None" in refused


def test_what_is_no_cache(tmp_path: Path, capsys) -> None:
    image(tmp_path / "in/a.png")
    assert main(["convert", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")]) == 1
    assert "holds no cache that is known" in capsys.readouterr().err


def test_an_embedding_that_is_stored_once_is_used_everywhere(wan: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import UMT5EncoderModel

    from dit.codecs.pretrained import PipelineComponent

    whole = UMT5EncoderModel.from_pretrained(wan / "text_encoder")
    whole.save_pretrained(tmp_path / "text_encoder")
    path = tmp_path / "text_encoder/model.safetensors"
    weights = load_file(path)
    weights.pop("encoder.embed_tokens.weight", None)
    weights["shared.weight"] = whole.shared.weight.detach().clone()
    save_file(weights, path, metadata={"format": "pt"})
    part = PipelineComponent(
        library="transformers", kind="UMT5EncoderModel", model=str(tmp_path),
        subfolder="text_encoder", precision="float32",
    )  # fmt: skip
    tied = load(part)
    assert torch.equal(tied.encoder.embed_tokens.weight, whole.shared.weight)
