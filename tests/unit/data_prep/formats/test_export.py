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
from tests.families import pipeline_parts
from tests.media_files import image, video


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipeline_parts.wan(tmp_path_factory.mktemp("wan"))


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
def test_there_and_back(
    form: str, films: Path, wan: Path, tmp_path: Path, read_samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From and to folders with a colon, which other libraries take for an address."""
    monkeypatch.chdir(tmp_path)
    out, back = Path("data:out:1"), Path("wan:back")
    assert run(films, out, wan, form) == 0
    assert run(films, out, wan, form) == 0  # and again, where all is there
    source = {"parquet": out / "combined_parquet_dataset", "dfm": out / "dfm_shards"}.get(form, out)
    words = ["convert", source, "--output_dir", back, "--split", "0.7,0.3,0"]
    words += ["--processor", "wan", "--model_name", wan]
    assert main([str(word) for word in words]) == 0
    before, after = read_samples(out), read_samples(back)
    assert set(before) == set(after) and len(after) == 5
    for name, sample in after.items():
        tensors = {k for k, v in before[name].items() if isinstance(v, torch.Tensor)}
        for tensor in {"latent", "text"} if form == "dfm" else tensors:
            error = (sample[tensor].float() - before[name][tensor].float()).abs().max()
            # FastVideo's latents are not normalised; doing that again may move the last digit of a
            # number near 0.
            assert error < (1e-6 if (form, tensor) == ("parquet", "latent") else 1e-30), tensor
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
    folder, flux = tmp_path / "in", pipeline_parts.flux(tmp_path / "flux")
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
    assert "holds no known cache" in capsys.readouterr().err


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


# ------------------------------------------------------------------- image-to-video of Wan


def made_by_diffusers(wan: Path) -> dict[str, torch.Tensor]:
    """What other tools store of a clip of 9 frames, made by the pipeline."""
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline

    codec = AutoencoderKLWan.from_pretrained(wan, subfolder="vae")
    pipe = WanImageToVideoPipeline(
        vae=codec, tokenizer=None, text_encoder=None, transformer=None, scheduler=None
    )
    shown = torch.rand(1, 3, 9, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    column = (1, -1, 1, 1, 1)
    mean, std = (torch.tensor(codec.config[f"latents_{name}"]).view(column) for name in MOMENTS)
    with torch.no_grad():
        raw = codec.encode(shown).latent_dist.mode()
        given = (1, 16, 32, 48, 9, torch.float32, torch.device("cpu"))
        condition = pipe.prepare_latents(shown[:, :, 0], *given)[1][:, 4:]
    text, clip = torch.randn(7, 16), torch.randn(5, 16)
    found = {"raw": raw, "latent": (raw - mean) / std, "condition": condition}
    return {name: tensor[0] for name, tensor in found.items()} | {"text": text, "clip": clip}


MOMENTS = ("mean", "std")


def fastvideo(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A row as FastVideo's `i2v_record_creator` and its schema make it."""
    import pyarrow
    import pyarrow.parquet

    row: dict[str, object] = {"id": "a", "file_name": "a", "caption": "a cat", "fps": 16.0}
    row |= {"media_type": "video", "width": 48, "height": 32, "num_frames": 3}
    row["duration_sec"] = 9 / 16
    for name, tensor in tensors.items():
        row[f"{name}_bytes"] = tensor.numpy().tobytes()
        row[f"{name}_shape"] = list(tensor.shape)
        row[f"{name}_dtype"] = "float32"
    row |= {"pil_image_bytes": b"", "pil_image_shape": [], "pil_image_dtype": ""}
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "data_chunk_0.parquet")
    return folder


def test_parquet_of_fastvideo_becomes_shards_that_train(
    wan: Path, tmp_path: Path, read_samples, capsys
) -> None:
    """Its latents are raw, its condition of all frames is normalised; both are as ours after it."""
    theirs = made_by_diffusers(wan)
    columns = {"vae_latent": "raw", "first_frame_latent": "condition"}
    columns |= {"text_embedding": "text", "clip_feature": "clip"}
    given = {column: theirs[name] for column, name in columns.items()}
    cache = fastvideo(tmp_path / "cache/worker_0", given)
    words = ["convert", str(cache), "--output_dir", str(tmp_path / "out"), "--split", "1,0,0"]
    assert main(words) == 1
    assert "--processor wan" in capsys.readouterr().err
    assert main([*words, "--processor", "wan", "--model_name", str(wan)]) == 0
    (sample,) = read_samples(tmp_path / "out").values()
    wanted = {"latent": "latent", "condition_latent": "condition", "image_embed": "clip"}
    for name, of in wanted.items():
        assert sample[name].dtype == torch.float16
        assert (sample[name].float() - theirs[of]).abs().max() < 2e-3, name
    assert (theirs["raw"] - theirs["latent"]).abs().max() > 0.1  # so the scale shows
    assert torch.equal(sample["first_frame_latent"], sample["condition_latent"][:, :1])
    assert torch.equal(sample["text"], theirs["text"].bfloat16())
    assert (sample["num_frames"], sample["fps"]) == (9, 16)
    card = json.loads((tmp_path / "out/dataset_card.json").read_text())
    assert card["settings"]["latents"] == "raw"


def test_parquet_of_cosmos25_is_normalised_or_not_as_the_user_says(
    tmp_path: Path, read_samples, capsys
) -> None:
    model = pipeline_parts.cosmos25(tmp_path / "model")
    latent = torch.randn(16, 3, 4, 6, generator=torch.Generator().manual_seed(2))
    text = torch.randn(5, 48, generator=torch.Generator().manual_seed(3))
    cache = fastvideo(tmp_path / "cache", {"vae_latent": latent, "text_embedding": text})
    words = ["convert", str(cache), "--output_dir", str(tmp_path / "out"), "--split", "1,0,0"]
    words += ["--processor", "cosmos_predict25", "--model_name", str(model)]
    assert main(words) == 1
    assert "give --latents normalised where preprocess_cosmos2_5" in capsys.readouterr().err
    mean, std = (
        torch.tensor(json.loads((model / "vae/config.json").read_text())[f"latents_{name}"])
        for name in MOMENTS
    )
    whitened = (latent - mean[:, None, None, None]) / std[:, None, None, None]
    for kind, wanted in (("normalised", latent), ("raw", whitened)):
        assert main([*words, "--latents", kind, "--overwrite"]) == 0
        (sample,) = read_samples(tmp_path / "out").values()
        assert (sample["latent"].float() - wanted).abs().max() < 5e-3


def test_fastvideo_normalises_what_we_write_to_our_latents(
    films: Path, wan: Path, tmp_path: Path, read_samples
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out, back = tmp_path / "out", tmp_path / "back"
    assert run(films, out, wan, "parquet") == 0
    rows = parquet.read_table(out / "combined_parquet_dataset").to_pylist()
    config = json.loads((wan / "vae/config.json").read_text())
    mean, std = (np.float32(config[f"latents_{name}"])[:, None, None, None] for name in MOMENTS)
    ours = read_samples(out)
    for row in rows:
        tensors = {
            name: np.frombuffer(row[f"{name}_bytes"], np.float32).reshape(row[f"{name}_shape"])
            for name in ("vae_latent", "first_frame_latent", "clip_feature")
        }
        sample = ours[row["file_name"]]
        normalised = (tensors["vae_latent"] - mean) / std  # as their normalize_dit_input
        assert np.abs(normalised - sample["latent"].float().numpy()).max() < 1e-5
        assert np.array_equal(tensors["first_frame_latent"], sample["condition_latent"].float())
        assert tensors["first_frame_latent"].shape == tensors["vae_latent"].shape
        assert np.array_equal(tensors["clip_feature"], sample["image_embed"].float())
    words = ["convert", out / "combined_parquet_dataset", "--output_dir", back]
    words += ["--processor", "wan", "--model_name", wan, "--split", "1,0,0"]
    assert main([str(word) for word in words]) == 0
    for source, sample in read_samples(back).items():
        for name in ("condition_latent", "first_frame_latent", "image_embed"):
            assert torch.equal(sample[name], ours[source][name])


def test_automodel_has_one_frame_and_that_is_said(
    wan: Path, tmp_path: Path, read_samples, capsys
) -> None:
    """A `.meta` as its WanProcessor writes it: texts of 226 rows, pixels of the first frame."""
    theirs, cache = made_by_diffusers(wan), tmp_path / "cache"
    file = cache / "48x32/a.meta"
    file.parent.mkdir(parents=True)
    text = torch.cat([theirs["text"], torch.zeros(219, 16)])[None]
    content = {"video_latents": theirs["latent"][None].half(), "text_embeddings": text}
    content |= {"first_frame": torch.zeros(32, 48, 3, dtype=torch.uint8), "model_version": "wan2.1"}
    torch.save(content, file)
    row = {"cache_file": str(file), "bucket_resolution": [48, 32], "num_frames": 9, "prompt": "a"}
    (cache / "metadata_shard_0000.json").write_text(json.dumps([row]))
    index = {"model_type": "wan", "shards": ["metadata_shard_0000.json"]}
    (cache / "metadata.json").write_text(json.dumps(index))
    words = ["convert", str(cache), "--output_dir", str(tmp_path / "out"), "--split", "1,0,0"]
    assert main([*words, "--processor", "wan", "--model_name", str(wan)]) == 0
    said = capsys.readouterr().out
    assert "AutoModel's cache holds one frame" in said and "--workload_type i2v" in said
    (sample,) = read_samples(tmp_path / "out").values()
    assert torch.equal(sample["latent"], theirs["latent"].half())
    assert sample["text"].shape == (7, 16) and "condition_latent" not in sample
