"""The code on the card of an export, run as it stands, makes the picture that we make."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from dit.checkpoint_paths import write_manifest
from dit.codecs.text import ByteTable
from dit.codecs.text.hidream import LLAMA
from dit.codecs.vae import Pixel
from dit.config import ModelConfig, Sampler
from dit.config_loading import load_config
from dit.convert.cards import PictureCode, RunFacts
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.models.registry import family_of, named_model
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sampling.open_checkpoint import open_checkpoint
from recipes.runs import dit_xl
from tests.families import hidream
from tests.families.generation import from_noise
from tests.unit.convert.test_recipes_on_folders import FLOW, UNIPC, folder_of

FRAMES, ROWS, COLUMNS, BLOCK = 1, 4, 6, 2  # of a latent; pixels of a cell
EDM = {"_class_name": "EDMEulerScheduler", "sigma_max": 60.0, "sigma_data": 0.7}
BY_TOKENS = {"_class_name": FLOW, "use_dynamic_shifting": True, "shift_terminal": 0.1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dit, edm": ("dit_s", EDM, {"text_pad_to": None}),
    "dit, flow": ("dit_s", {"_class_name": FLOW, "shift": 2.5}, {"text_pad_to": 40}),
    "dit, beta": ("dit_s", {"_class_name": FLOW, "use_beta_sigmas": True}, {"text_pad_to": None}),
    "wan, unipc": (
        "wan2.1_t2v_1.3b",
        {"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0, **UNIPC},
        {"text_pad_to": 40, "in_channels": 4},
    ),
    "flux, by tokens": ("flux1_schnell", BY_TOKENS, {"pooled_size": 16}),
    "flux, guidance": ("flux1_kontext", BY_TOKENS, {"pooled_size": 16, "reference_latents": 0}),
    "sd3": ("sd3", {"_class_name": FLOW, "shift": 3.0}, {"pooled_size": 16}),
}


def data_card(channels: int) -> dict[str, Any]:
    """Of grey pictures packed as pixels."""
    codec = Pixel.of(block=BLOCK, colours=1)
    text = ByteTable(width=16, pooled=True)
    size = {"num_frames": FRAMES, "height": BLOCK * ROWS, "width": BLOCK * COLUMNS, "samples": 9}
    latent = {"channels": channels, "stride": BLOCK, "temporal_stride": 1}
    latent |= {"mean": [0.1] * channels, "std": [0.5] * channels}
    return {
        "format_version": 1,
        "processor": {"name": codec.name, **codec.settings},
        "text_encoder": text.settings,
        "latent": latent,
        "sizes": [size],
        "sources": ["/data/pictures"],
    }


def model_of(size: str, changes: dict[str, Any]) -> ModelConfig:
    named = named_model(size)
    family = family_of(named)
    own = {**family.sizes[size], **family.tiny[size], "mlp_ratio": named.mlp_ratio}
    return family.config(name=size, **{**own, "crossattn_emb_size": 16, **changes})


def block_of(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)\n```", (folder / "README.md").read_text(), re.DOTALL)
    return code.replace('"FOLDER"', json.dumps(str(folder)))


@pytest.mark.parametrize("case", CASES)
def test_the_loop_makes_our_picture(case: str, groups, tmp_path: Path, monkeypatch) -> None:
    size, scheduler, changes = CASES[case]
    model = model_of(size, changes)
    hf = folder_of(tmp_path / "hf", model, None, whole=True)
    (hf / "scheduler_config.json").write_text(json.dumps(scheduler))
    told = {"text_pad_to": changes["text_pad_to"]} if "text_pad_to" in changes else {}
    done = import_weights(hf, tmp_path / "ours", **told)
    card = data_card(model.in_channels)
    (done.path / "dataset_card.json").write_text(json.dumps(card))
    (done.path / "manifest.json").unlink()
    write_manifest(done.path, {})  # with the card
    out = export_weights(done.path, tmp_path / "out", ExportOptions()).path
    assert "somebody" not in (out / "dataset_card.json").read_text()

    monkeypatch.chdir(tmp_path)
    # Opening a network may draw, too.
    code = block_of(out).replace("\nx = ", "\ntorch.manual_seed(3)\nx = ")
    exec(compile(code, "README.md", "exec"), {})
    picture = np.array(Image.open(tmp_path / "picture.png").convert("L"))

    torch.manual_seed(3)
    noise = torch.randn(model.in_channels, FRAMES, ROWS, COLUMNS)
    run = open_checkpoint(done.path, weights="model", options=LoadOptions())
    request = Request(
        inputs=run.encoder.encode_all("a prompt"), negative={},
        latent_FHW=(FRAMES, ROWS, COLUMNS), fps=float("nan"), seed=0,
    )  # fmt: skip
    solver = Sampler.UNIPC if "unipc" in case else Sampler.EULER
    settings = SamplingSettings(num_steps=35, sampler=solver)
    with from_noise(run.config, noise):
        (latent,) = generate_latents(run.model, [request], config=run.config, settings=settings)
    assert run.decoder is not None
    ours = run.decoder.decode(latent.cpu()).numpy()[0, :, :, 0]
    assert np.abs(ours.astype(int) - picture.astype(int)).max() <= 1 and picture.std() > 5


@pytest.mark.parametrize(
    ("size", "kind", "last"),
    [
        ("flux1_dev", "FluxPipeline", 'pipe("a fox", height=8, width=12).images[0].save('),
        ("wan2.1_t2v_1.3b", "WanPipeline", 'export_to_video(clip, "clip.mp4")'),
        ("wan2.1_i2v_14b", "WanImageToVideoPipeline", 'image=load_image("first.png")'),
        ("sd3.5_large", "StableDiffusion3Pipeline", '.images[0].save("picture.png")'),
        ("qwen_image", "QwenImagePipeline", '.images[0].save("picture.png")'),
        ("hunyuanvideo_15", "HunyuanVideo15Pipeline", 'export_to_video(clip, "clip.mp4")'),
        ("hidream_i1_full", "HiDreamImagePipeline", '.images[0].save("picture.png")'),
        ("omnigen2", "OmniGen2Pipeline", '.images[0].save("picture.png")'),
        ("anima", "AnimaModularPipeline", 'output="images")[0].save("picture.png")'),
    ],
)
def test_weights_of_a_published_vae_go_into_their_pipeline(size: str, kind: str, last: str) -> None:
    import diffusers

    config = load_config(dit_xl(), overrides=[f"model.name={size}"])
    sizes = {"sizes": [{"num_frames": 1, "height": 8, "width": 12}]}
    for adapters in (False, True):
        code = PictureCode(config=config, card=sizes, prompt="a fox", adapters=adapters).text
        compile(code, "README.md", "exec")
        assert kind in code and last in code and '"FOLDER"' in code and '"BASE"' in code
        found = re.findall(r"^from diffusers import (.+)$", code, re.MULTILINE)
        names = [name for line in found for name in line.split(", ")]
        assert all(hasattr(diffusers, name) for name in names)
        assert (kind in names) == (size != "omnigen2")
        assert ("load_lora_adapter" in code) == adapters
        if size == "omnigen2":  # whose folder has the code of its classes
            assert "trust_remote_code=True" in code
            assert ("pipe.transformer = network" in code) == (not adapters)
    if size == "anima":  # both networks, where one is trained with the other
        model: Any = replace(config.model, text_conditioner="trained")
        config = replace(config, model=model)
        code = PictureCode(config=config, card=sizes).text
        compile(code, "README.md", "exec")
        assert "(transformer=network, text_conditioner=text_conditioner)" in code
        assert 'AnimaTextConditioner.from_pretrained("FOLDER", subfolder="text_cond' in code
        code = PictureCode(config=config, card=sizes, adapters=True).text
        assert code.count("load_lora_adapter") == 2 and 'prefix="text_conditioner"' in code
    whole = PictureCode(config=config, card=sizes, whole=True).text
    opened = kind if "Modular" in kind or size == "omnigen2" else "DiffusionPipeline"
    assert f'{opened}.from_pretrained("FOLDER"' in whole and last.partition("(")[0] in whole


def test_the_code_of_a_student_takes_its_steps_without_guidance(tmp_path: Path) -> None:
    keys = ("distill.method=opd", "lora.rank=2", "distill.steps=3")
    sizes = {"sizes": [{"num_frames": 1, "height": 8, "width": 12}]}
    for size, told in (
        ("sd3.5_large", "num_inference_steps=3, guidance_scale=1.0)"),
        ("flux1_dev", "num_inference_steps=3)"),  # whose scale is an input of the network
    ):
        config = load_config(
            dit_xl(), overrides=[f"model.name={size}", "objective.name=flow", *keys]
        )
        code = PictureCode(config=config, card=sizes, adapters=True).text
        compile(code, "README.md", "exec")
        assert told in code
        facts = RunFacts.of(tmp_path / "step_00000004", config)
        assert "- Distilled for: 3 steps of euler, guidance 1" in facts.lines()


@pytest.mark.parametrize("whole", [False, True])
def test_parts_beside_the_published_folder_are_loaded(
    whole: bool, tmp_path: Path, monkeypatch
) -> None:
    """A folder without Llama, as HiDream-I1's is, makes a picture by the code as it stands."""
    hidream.pipeline(tmp_path)
    folder, parts = tmp_path / "pipeline", tmp_path / "parts"
    index = json.loads((folder / "model_index.json").read_text())
    for name, kind in (("text_encoder_4", "LlamaForCausalLM"), ("tokenizer_4", "AutoTokenizer")):
        shutil.rmtree(folder / name)
        del index[name]
        opened = getattr(transformers, kind).from_pretrained
        monkeypatch.setattr(
            f"transformers.{kind}.from_pretrained",
            lambda place, *args, name=name, opened=opened, **options: opened(
                str(parts / name) if place == LLAMA else place, *args, **options
            ),
        )
    (folder / "model_index.json").write_text(json.dumps(index))
    config = load_config(dit_xl(), overrides=["model.name=hidream_i1_full"])
    card = {"sizes": [{"num_frames": 1, "height": 8, "width": 12}]}
    code = PictureCode(config=config, card=card, base=str(folder), whole=whole).text
    here = str(folder if whole else folder / "transformer")
    told = {'"FOLDER"': json.dumps(here), 'pipe.to("cuda")': "pipe.default_sample_size = 4"}
    told['"a prompt"'] = '"a prompt", num_inference_steps=2'
    for text, other in told.items():
        assert text in code
        code = code.replace(text, other)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert Image.open("picture.png").size[0] > 0
