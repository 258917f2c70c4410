"""Codecs and text encoders give what the pipelines of Diffusers give, on tiny random weights."""

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.cli.next_command import edit_keys, from_scratch, tuning_of
from data_prep.cli.parser import main
from dit.codecs import text, vae
from dit.codecs.dataset_card import CodecError
from dit.codecs.pretrained import (
    PipelineComponent,
    _loaded,
    forget,
    load,
    model_config_of,
    visits,
)
from dit.codecs.vae import CODECS
from dit.codecs.vae.autoencoder import Autoencoder
from dit.config_loading import load_config
from recipes.runs import dit_xl
from tests.families import encoding, pipeline_parts
from tests.media_files import image, video

CAPTION = 'A  sign says "open" &amp; shut'
FAMILIES = tuple(pipeline_parts.MAKERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {name: make(root / name) for name, make in pipeline_parts.MAKERS.items()}


codec = encoding.codec
encoder = partial(encoding.encoder, max_sequence_length=48)


def clip(frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, frames, 32, 64, generator=generator) * 2 - 1


def raw(name: str, model: Autoencoder, video_CFHW: torch.Tensor) -> torch.Tensor:
    """Normalised latent before it is rounded."""
    return model.whitening.apply(model.encode_raw(video_CFHW))


def parts_of(folder: Path, **kinds: str) -> dict:
    """Components as the pipeline loads them."""
    import diffusers
    import transformers

    found = {}
    for name, kind in kinds.items():
        owner = diffusers if hasattr(diffusers, kind) else transformers
        found[name] = getattr(owner, kind).from_pretrained(folder, subfolder=name)
    return found


def test_flux_latents_are_those_of_its_pipeline(folders) -> None:
    from diffusers import FluxImg2ImgPipeline

    pipe = FluxImg2ImgPipeline(
        scheduler=None, text_encoder=None, tokenizer=None, text_encoder_2=None,
        tokenizer_2=None, transformer=None, **parts_of(folders["flux"], vae="AutoencoderKL"),
    )  # fmt: skip
    picture = clip(1)
    pipe.vae.encode = lambda x, encode=pipe.vae.encode: Namespace(latents=encode(x)[0].mode())
    expected = pipe._encode_vae_image(picture[None, :, 0], generator=None)
    found = raw("flux", codec("flux", folders["flux"]), picture)
    assert (found[None, :, 0] - expected).abs().max() < 1e-5 and found.std() > 0.01


def test_wan_latents_and_first_frame_are_those_of_its_pipeline(folders) -> None:
    from diffusers import WanImageToVideoPipeline

    kinds = {"vae": "AutoencoderKLWan", "image_encoder": "CLIPVisionModel"}
    kinds["image_processor"] = "CLIPImageProcessor"
    pipe = WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, transformer=None, scheduler=None,
        **parts_of(folders["wan"], **kinds),
    )  # fmt: skip
    model, shown = codec("wan", folders["wan"], workload_type="i2v"), clip(9)
    mean = torch.tensor(pipe.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(pipe.vae.config.latents_std).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        expected = (pipe.vae.encode(shown[None]).latent_dist.mode() - mean) / std
        _, condition = pipe.prepare_latents(
            shown[None, :, 0], 1, 16, 32, 64, 9, torch.float32, torch.device("cpu")
        )
    assert (raw("wan", model, shown) - expected[0]).abs().max() < 1e-5
    (parts,) = model.encode_batch([shown], keys=["a"])
    assert parts["latent"].shape == (16, 3, 4, 8)
    first = raw("wan", model, shown[:, :1])
    # Behind four channels of mask; the codec is causal, so blank frames behind it do not matter.
    assert (first[:, 0] - condition[0, 4:, 0]).abs().max() < 1e-5
    assert (parts["first_frame_latent"].float() - first).abs().max() < 2e-3
    levels = ((shown[:, 0].permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
    with torch.no_grad():
        features = pipe.encode_image(Image.fromarray(levels), torch.device("cpu"))
    assert (model._image_embeds([Image.fromarray(levels)]) - features).abs().max() < 1e-5


def test_hunyuan_latents_and_features_are_those_of_its_pipeline(folders) -> None:
    from diffusers import HunyuanVideo15ImageToVideoPipeline as Pipeline
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    folder = folders["hunyuan"]
    kinds = {"vae": "AutoencoderKLHunyuanVideo15", "image_encoder": "SiglipVisionModel"}
    parts = parts_of(folder, **kinds, feature_extractor="SiglipImageProcessor")
    model = codec("hunyuan", folder, workload_type="i2v")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 64, 3), np.uint8))
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[:, None] / 127.5 - 1
    with torch.no_grad():
        expected = Pipeline._get_image_latents(
            parts["vae"], HunyuanVideo15ImageProcessor(vae_scale_factor=4), picture, 32, 64, "cpu"
        )
        features = Pipeline._get_image_embeds(
            parts["image_encoder"], parts["feature_extractor"], picture, "cpu"
        )
    assert (raw("hunyuan", model, pixels) - expected[0]).abs().max() < 1e-5
    assert (model._image_embeds([picture]) - features).abs().max() < 1e-5
    assert raw("hunyuan", model, clip(5)).shape == (4, 2, 8, 16)


@pytest.mark.parametrize("frames", [1, 9, 17])
def test_cosmos_latents_are_those_of_its_pipeline_without_sigma_data(folders, frames: int) -> None:
    from diffusers import CosmosVideoToWorldPipeline, EDMEulerScheduler

    scheduler = EDMEulerScheduler(sigma_max=80, sigma_min=0.002, sigma_data=0.5)
    pipe = CosmosVideoToWorldPipeline(
        text_encoder=None, tokenizer=None, transformer=None, scheduler=scheduler,
        safety_checker=torch.nn.Identity(),
        **parts_of(folders["cosmos"], vae="AutoencoderKLCosmos"),
    )  # fmt: skip
    with torch.no_grad():
        found = pipe.prepare_latents(
            clip(frames)[None], 1, 16, 32, 64, frames, True, False, torch.float32
        )
    expected = found[1][0] / 0.5
    model = codec("cosmos", folders["cosmos"])
    assert (raw("cosmos", model, clip(frames)) - expected).abs().max() < 1e-5
    assert (model.stride, model.temporal_stride) == (8, 8)


def true_length(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[0, : int(mask.sum())]


@pytest.mark.parametrize("caption", [CAPTION, ""])
def test_texts_are_those_of_the_pipelines(folders, caption: str) -> None:
    from diffusers import CosmosTextToWorldPipeline, FluxPipeline, WanPipeline

    def check(name: str, expected: torch.Tensor) -> None:
        found = encoder(name, folders[name]).embed(caption)["text"]
        assert (found - expected[0, : len(found)]).abs().max() < 1e-5
        assert len(found) == len(seen[name](caption)) + 1  # one token a letter, and the end

    seen = {"wan": lambda c: 'A sign says "open" & shut' if c else "", "flux": str, "cosmos": str}
    cpu, blank = torch.device("cpu"), {"scheduler": None, "transformer": None, "vae": None}
    names = ("tokenizer", "text_encoder")
    with torch.no_grad():
        kinds = dict(zip(names, ("AutoTokenizer", "UMT5EncoderModel"), strict=True))
        wan = WanPipeline(**blank, **parts_of(folders["wan"], **kinds))
        check("wan", wan._get_t5_prompt_embeds(caption, 1, 48, cpu))
        kinds["text_encoder"] = "T5EncoderModel"
        cosmos = CosmosTextToWorldPipeline(
            **blank, **parts_of(folders["cosmos"], **kinds), safety_checker=torch.nn.Identity()
        )
        check("cosmos", cosmos._get_t5_prompt_embeds(caption, 48, cpu))
        kinds |= {"text_encoder": "CLIPTextModel", "tokenizer_2": "AutoTokenizer"}
        kinds["text_encoder_2"] = "T5EncoderModel"
        flux = FluxPipeline(**blank, **parts_of(folders["flux"], **kinds))
        check("flux", flux._get_t5_prompt_embeds(caption, 1, 48, cpu))
        pooled = encoder("flux", folders["flux"]).embed(caption)["pooled_text"]
        assert (pooled - flux._get_clip_prompt_embeds(caption, 1, cpu)[0]).abs().max() < 1e-5


def test_hunyuan_texts_are_those_of_its_pipeline(folders) -> None:
    from diffusers import HunyuanVideo15Pipeline as Pipeline

    kinds = {"tokenizer": "AutoTokenizer", "text_encoder": "Qwen2_5_VLTextModel"}
    kinds |= {"tokenizer_2": "ByT5Tokenizer", "text_encoder_2": "T5EncoderModel"}
    parts = parts_of(folders["hunyuan"], **kinds)
    with torch.no_grad():
        first, mask = Pipeline._get_mllm_prompt_embeds(
            parts["text_encoder"], parts["tokenizer"], CAPTION, "cpu"
        )
        second, mask_2 = Pipeline._get_byt5_prompt_embeds(
            parts["tokenizer_2"], parts["text_encoder_2"], CAPTION, "cpu"
        )
    ours = encoder("hunyuan", folders["hunyuan"], max_sequence_length=None)
    found = ours.embed(CAPTION)
    assert (found["text"] - true_length(first, mask)).abs().max() < 1e-5
    assert (found["text_2"] - true_length(second, mask_2)).abs().max() < 1e-5
    assert len(found["text_2"]) == len('Text "open". ') + 1
    assert ours.embed("no words in quotes")["text_2"].shape == (0, 16)


def test_hunyuanimage_packs_what_its_pipeline_encodes(tmp_path: Path, read_samples) -> None:
    """Latents, captions and quoted words of two pictures; no tiles, which Diffusers cannot cut."""
    from diffusers import HunyuanImagePipeline

    folder = pipeline_parts.hunyuanimage(tmp_path / "pipeline")
    kinds = {"tokenizer": "AutoTokenizer", "text_encoder": "Qwen2_5_VLForConditionalGeneration"}
    kinds |= {"tokenizer_2": "ByT5Tokenizer", "text_encoder_2": "T5EncoderModel"}
    parts = parts_of(folder, vae="AutoencoderKLHunyuanImage", **kinds)
    pipe = HunyuanImagePipeline(scheduler=None, transformer=None, **parts)
    captions, pixels = (CAPTION, "no words in quotes"), []
    for number, caption in enumerate(captions):
        file = image(tmp_path / f"in/{number}.png", 48, 32, seed=number)
        (tmp_path / f"in/{number}.txt").write_text(caption)
        pixels.append(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 127.5 - 1)
    options = ["--image_dir", tmp_path / "in", "--output_dir", tmp_path / "out", "--split", "1,0,0"]
    options += ["--processor", "hunyuanimage", "--model_name", folder, "--num_workers", 0]
    assert main(["image", *map(str, options)]) == 0
    found = sorted(read_samples(tmp_path / "out").values(), key=lambda one: -len(one["text_2"]))
    for sample, caption, picture in zip(found, captions, pixels, strict=True):
        text, mask, glyphs, glyph_mask = pipe.encode_prompt(caption, "cpu")
        with torch.no_grad():
            latent = pipe.vae.encode(picture[None]).latent_dist.mode()[0] * 0.75
        expected = {"text": text[mask.bool()], "text_2": glyphs[glyph_mask.bool()]}
        for name, value in ({"latent": latent[:, None]} | expected).items():
            assert sample[name].shape == value.shape
            assert not len(value) or (sample[name] - value).abs().max() < 2e-2
    model, words = codec("hunyuanimage", folder), encoder("hunyuanimage", folder)
    assert model.stride == 4 and words.width == 16 and words.max_length == 48
    assert words.count(CAPTION) == len(expected["text"]) - len(captions[1]) + len(CAPTION)
    with pytest.raises(CodecError, match="--tiling: processor 'hunyuanimage' encodes no tiles"):
        codec("hunyuanimage", folder, tiling=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_are_the_samples_own(folders, name: str) -> None:
    drawing, mean = codec(name, folders[name], stochastic=True), codec(name, folders[name])
    frames = 1 + mean.temporal_stride if name != "flux" else 1
    videos = [clip(frames, seed) for seed in (1, 2)]
    both = drawing.encode_batch(videos, keys=["a", "b"])
    alone = drawing.encode_batch(videos[1:], keys=["b"])[0]["latent"]
    other = drawing.encode_batch(videos[1:], keys=["c"])[0]["latent"]
    still = mean.encode_batch(videos[1:], keys=["b"])[0]["latent"]
    assert (both[1]["latent"].float() - alone.float()).abs().max() < 2e-3
    if name == "cosmos":  # its codec has no deviation
        assert torch.equal(alone, other) and torch.equal(alone, still)
    else:
        assert not torch.equal(alone, other) and not torch.equal(alone, still)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_distribution_is_that_of_the_autoencoder(folders, name: str) -> None:
    """Mean and variance of the whitened latent, from those that Diffusers' autoencoder gives."""
    plain = codec(name, folders[name])
    if name == "cosmos":  # its codec has no deviation
        with pytest.raises(CodecError, match="--latent_distribution: the autoencoder of processor"):
            codec(name, folders[name], latent_distribution=True)
        return
    both = codec(name, folders[name], latent_distribution=True)
    video_CFHW = clip(1 if name == "flux" else 1 + plain.temporal_stride, 3)
    (found,) = both.encode_batch([video_CFHW], keys=["a"])
    assert {k: v.dtype for k, v in found.items()} == dict.fromkeys(
        ("latent", "latent_logvar"), torch.bfloat16
    )
    with torch.no_grad():
        given = video_CFHW[None, :, 0] if name == "flux" else video_CFHW[None]
        of_model = plain.model.encode(given).latent_dist
    mean, std = (x[0].reshape(found["latent"].shape) for x in (of_model.mode(), of_model.std))
    wanted = plain.whitening.apply(mean)
    torch.testing.assert_close(found["latent"].float(), wanted, atol=1e-2, rtol=1e-2)
    # A deviation does not know the mean of the whitening: by differences of whitened latents
    std = plain.whitening.apply(mean + std) - wanted
    found_std = (found["latent_logvar"].float() / 2).exp()
    torch.testing.assert_close(found_std, std, atol=1e-3, rtol=3e-2)
    frames, height, width = video_CFHW.shape[1:]
    size = {"frames": frames, "height": height, "width": width}
    assert both.extra_bytes(**size) - plain.extra_bytes(**size) == found["latent_logvar"].nbytes
    assert both.settings == plain.settings | {"latent_distribution": True}
    with pytest.raises(CodecError, match="--latent_distribution and --stochastic exclude"):
        codec(name, folders[name], latent_distribution=True, stochastic=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_card_rebuilds_codec_and_encoder(folders, name: str) -> None:
    model, words = codec(name, folders[name]), encoder(name, folders[name])
    whitening = {"mean": list(model.whitening.mean), "std": list(model.whitening.std)}
    card = json.loads(json.dumps({
        "format_version": 1, "latent": whitening, "text_encoder": words.settings,
        "processor": {"name": model.name, **model.settings},
    }))  # fmt: skip
    rebuilt = vae.codec_of_card(card)
    assert rebuilt == model
    frames = 1 if name == "flux" else 1 + model.temporal_stride
    latent = model.encode(clip(frames))
    assert rebuilt.decode(latent).shape == (frames, 32, 64, 3)
    assert torch.equal(text.text_encoder_of_card(card).encode("x"), words.encode("x"))


@pytest.mark.parametrize("name", FAMILIES)
def test_packing_with_every_processor(folders, name: str, tmp_path: Path, read_samples) -> None:
    for index in range(4):
        image(tmp_path / f"in/{index}.png", 80, 48, seed=index)
    source = ["--image_dir", tmp_path / "in"]
    if name != "flux":
        video(tmp_path / "films/a.mp4", 20, size=(96, 64))
        source += ["--video_dir", tmp_path / "films"]
    options = ["--processor", name, "--model_name", folders[name], "--num_workers", 0]
    options += ["--split", "1,0,0", "--batch_size", 2, "--output_dir", tmp_path / "out"]
    if name in ("wan", "hunyuan"):
        options += ["--workload_type", "i2v"]
    assert main(["video", *map(str, source), *map(str, options)]) == 0
    samples = read_samples(tmp_path / "out")
    assert len(samples) == (4 if name == "flux" else 5)
    model = codec(name, folders[name])
    for sample in samples.values():
        stride = model.temporal_stride
        assert (sample["num_frames"] - 1) % stride == 0
        assert sample["latent"].shape[1] == 1 + (sample["num_frames"] - 1) // stride
        assert sample["text"].dtype == torch.bfloat16 and sample["text"].shape[1] == 16
        assert ("pooled_text" in sample) == (name == "flux")
        assert ("image_embed" in sample) == (name in ("wan", "hunyuan"))
    assert main(["inspect", str(tmp_path / "out")]) == 0


def test_the_next_command_tunes_the_network_that_lies_beside(
    folders, tmp_path: Path, capsys, repo_root: Path
) -> None:
    """With the encoders alone there is nothing to tune; a name of the hub is downloaded first."""
    image(tmp_path / "in/0.png", 83, 51)
    folder = shutil.copytree(folders["flux"], tmp_path / "flux")
    options = ["--image_dir", tmp_path / "in", "--output_dir", tmp_path / "out", "--overwrite"]
    options += ["--processor", "flux", "--model_name", folder, "--split", "1,0,0"]
    options += ["--num_workers", 0]
    assert main(["image", *map(str, options)]) == 0
    said = capsys.readouterr().out
    assert "conf/dit_xl_image.yaml" in said.splitlines()[-1]
    assert "cropped" in said and "patch_spatial" not in said  # a published network has its own
    (folder / "transformer").mkdir()
    (folder / "transformer/diffusion_pytorch_model.safetensors").touch()
    assert main(["image", *map(str, options)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert (
        f"conf/flux_lora.yaml dataset.path={tmp_path / 'out'} checkpoint.load_hf={folder}" in said
    )
    assert "model." not in said  # the weights say their sizes
    padded = encoder(
        "flux", folder, text_padding="keep"
    )  # the states of padding, which no DiT sees
    config, keys = from_scratch("image", codec("flux", folder), padded)
    assert config == "conf/flux_lora.yaml" and keys["lora.rank"] == "null"
    words = [f"{key}={value}" for key, value in keys.items()]
    run = load_config(dit_xl(), config_file=repo_root / config, overrides=words)
    assert run.model.text_pad_to == "stored" and not run.lora.enabled
    model, words = codec("flux", folder), encoder("flux", folder)
    assert tuning_of(model, encoder("cosmos", folders["cosmos"])) is None
    assert tuning_of(replace(model, model_name="them/flux@v2"), words) == (
        "conf/flux_lora.yaml",
        {"checkpoint.load_hf": "models/flux"},
        "hf download them/flux --local-dir models/flux --revision v2",
    )


def test_keys_that_tune_published_networks_fit_their_configurations(repo_root: Path) -> None:
    every = [c for c in CODECS.values() if issubclass(c, Autoencoder)]
    codecs = [c for c in every if c.tuning]
    untuned = {"cosmos", "cosmos_predict25"}
    assert {c.name for c in every if not c.tuning} == untuned
    for codec in codecs:
        config, *keys = codec.tuning
        if keys == ["model.name=custom"]:  # the sizes, and whose they are, are the folder's
            keys = []
        usual = load_config(dit_xl(), config_file=repo_root / config, overrides=keys)
        if codec.edits_pictures or codec.tuning_of_edits:
            keys += codec.tuning_of_edits
            edits = load_config(dit_xl(), config_file=repo_root / config, overrides=keys)
            assert edits.model.family == usual.model.family, codec.name
            assert edits.model.reference_latents  # type: ignore[attr-defined]


def test_references_have_their_places_in_the_next_command() -> None:
    counts = [edit_keys(CODECS["ltx"], n)["model.reference_latents"] for n in (0, 1, 3)]
    assert counts == ["1", "1", "3"]
    assert edit_keys(CODECS["flux"], 1) == {"model.name": "flux1_kontext"}
    assert not edit_keys(CODECS["wan"], 1)


def test_what_is_no_pipeline(tmp_path: Path, capsys) -> None:
    image(tmp_path / "in/a.png")
    options = ["--image_dir", tmp_path / "in", "--output_dir", tmp_path / "out"]
    options += ["--processor", "flux", "--model_name", tmp_path / "in"]
    assert main(["image", *map(str, options)]) == 1
    said = capsys.readouterr().err
    assert "vae/ cannot be loaded as AutoencoderKL" in said and "layout of Diffusers" in said


@pytest.mark.parametrize(("name", "model"), [("flux", "wan"), ("ltx", "wan"), ("wan", "hunyuan")])
def test_a_model_of_another_class_is_named(folders, name: str, model: str) -> None:
    """Diffusers would leave the weights that it misses at random values."""
    with pytest.raises(
        CodecError,
        match=r"vae/ is of class AutoencoderKL\w+, but the processor needs AutoencoderKL\w*",
    ):
        codec(name, folders[model])


def test_a_model_that_is_neither_here_nor_on_the_hub() -> None:
    part = PipelineComponent(
        library="diffusers", kind="AutoencoderKL", model="models/wann", subfolder="vae",
        local_only=True,
    )  # fmt: skip
    with pytest.raises(CodecError, match="there is no folder models/wann here"):
        model_config_of(part)


def test_weights_are_loaded_once(folders) -> None:
    model = codec("wan", folders["wan"])
    forget()
    assert model.model is model.model and _loaded.cache_info().misses == 1


def test_a_network_visits_a_device_and_goes_back_whoever_loads_it(folders, monkeypatch) -> None:
    part = PipelineComponent(
        library="diffusers", kind="AutoencoderKLWan", model=str(folders["wan"]), subfolder="vae",
        precision="bfloat16",
    )  # fmt: skip
    with torch.inference_mode():  # as encoders load
        network = load(part)
    went = []
    monkeypatch.setattr(network, "to", lambda device: went.append(device) or network)
    with pytest.raises(torch.OutOfMemoryError), visits("there"):
        for _ in range(2):
            assert load(replace(part, device="there")) is network
        raise torch.OutOfMemoryError("no room")
    assert went == ["there", "there", "cpu"] and load(part) is network
    assert not any(p.is_inference() for p in network.parameters())
