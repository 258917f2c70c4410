"""Videos with given pictures and clips: the same latents on one process and on layouts of two."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dit.sampling.media_files import _write_mp4
from tests.families import ltx, ltx2, pipeline_parts
from tests.families.case import gap
from tests.families.wan import NETWORKS, pipeline, random_wan
from tests.launching import ROOT, run

LAYOUTS = {
    "tp2+sp": ("--tensor_model_parallel_size", "2", "--sequence_parallel"),
    "cp2": ("--context_parallel_size", "2"),
    "pp2": ("--pipeline_model_parallel_size", "2"),
}
KINDS = ("i2v_2.1", "flf2v", "two experts", "5b", "ltx", "ltx2")
SIZE = ("--height", "32", "--width", "64", "--num_video_frames", "5")
ASKED = ("--num_steps", "4", "--guidance", "3.5", "--weights", "model", "--save_latents")

# One command after the other, each as its command line has it: a start takes longer than a video.
SCRIPT = """
import json, sys
from dit.convert.cli import main as convert
from recipes.generate_dit import main as generate
for arguments in json.loads(sys.argv[1]):
    assert (convert if arguments[0] == "import" else generate)(arguments) == 0, arguments
"""


def commands(kind: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Imports of the tiny pipeline of a kind, and the generation of two videos of its own."""
    of_kind = {"ltx": ltx_commands, "ltx2": ltx2_commands}
    make = of_kind.get(kind, partial(wan_commands, kind))
    imports, generate = make(folder)
    parts = str(folder / "pipeline")
    return imports, [*generate, *ASKED, "--t5_cache_dir", parts, "--tokenizer_cache_dir", parts]


def ltx_commands(folder: Path) -> tuple[list[list[str]], list[str]]:
    """A picture and a clip at frames of the video, and a reference video beside them."""
    ltx.pipeline(folder, ltx.CAUSAL)
    imported = ["import", "--hf-path", str(folder / "pipeline"), "--megatron-path"]
    prompts = [{"prompt": "a red fox"}, {"prompt": "a hen", "reference_path": clip(folder, 1)}]
    generate = ["--prompts_file", written(prompts, folder), "--checkpoint_path", f"{folder}/high"]
    generate += ["--reference_video", clip(folder, 2), "--image", pictures(folder)[0], "--video"]
    generate += [clip(folder, 3), "--at_frame", "0", "--at_frame", "8", "--strength", "0.7"]
    generate += ["--strength", "1", "--condition_noise", "0.15", "--sampler", "euler"]
    generate += ["--height", "96", "--width", "64", "--num_video_frames", "33", "--fps", "25"]
    return [[*imported, str(folder / "high"), "model.reference_latents=1"]], generate


def ltx2_commands(folder: Path) -> tuple[list[list[str]], list[str]]:
    """First frames of clips with sound, with every kind of guidance of both streams."""
    parts = pipeline_parts.ltx2(folder / "pipeline")
    sizes = {"in_channels": 8, "out_channels": 8, "attention_head_dim": 8}
    sizes |= {"audio_in_channels": 16, "audio_out_channels": 16, "audio_attention_head_dim": 4}
    sizes |= {"caption_channels": 16, "cross_attention_dim": 32, "audio_cross_attention_dim": 16}
    network = ltx2.CASE.random(seed=4, **ltx2.VERSIONS["2.3"] | sizes)
    network.save_pretrained(parts / "transformer")
    prompts = [{"prompt": "a red fox"}, {"prompt": "a hen", "image_path": pictures(folder)[1]}]
    generate = ["--prompts_file", written(prompts, folder), "--checkpoint_path", f"{folder}/high"]
    generate += ["--image", pictures(folder)[0], "--audio_guidance", "5", "--sampler", "euler"]
    generate += ["--stg_scale", "1", "--stg_blocks", "1", "--modality_scale", "3"]
    generate += ["--guidance_rescale", "0.5", "--fps", "12"]
    generate += ["--height", "96", "--width", "64", "--num_video_frames", "17"]
    return [["import", "--hf-path", str(parts), "--megatron-path", f"{folder}/high"]], generate


def clip(folder: Path, seed: int) -> str:
    """A file of 21 random pictures."""
    pictures = np.random.default_rng(seed).integers(0, 256, (21, 48, 40, 3), dtype=np.uint8)
    _write_mp4(file := folder / f"{seed}.mp4", pictures, fps=25)
    return str(file)


def wan_commands(kind: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Videos from their first frames, and last ones where the network takes those."""
    two = kind == "two experts"
    parts, more = folder / "pipeline", {}
    if two:
        more = {"transformer_2": random_wan(seed=1, **NETWORKS["i2v_2.2"]), "boundary_ratio": 0.875}
    pipeline(folder, "i2v_2.2" if two else kind, expand_timesteps=kind == "5b", **more)
    sources = {"high": parts, "low": parts / "transformer_2"}
    imports = [
        ["import", "--hf-path", str(source), "--megatron-path", str(folder / name)]
        for name, source in sources.items()
        if two or name == "high"
    ]
    first, last, other = pictures(folder)
    prompts = [{"prompt": "a red fox"}, {"prompt": "a hen", "image_path": other}]
    generate = ["--checkpoint_path", str(folder / "high"), "--image", first, *SIZE]
    if kind == "flf2v":
        generate += ["--last_image", last]
        prompts[1]["last_image_path"] = first
    if two:
        generate += ["--checkpoint_path_low", str(folder / "low"), "--offload_experts"]
    return imports, [*generate, "--prompts_file", written(prompts, folder), "--sampler", "unipc"]


def written(prompts: list[dict[str, str]], folder: Path) -> str:
    """A file of prompts."""
    (file := folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return str(file)


def pictures(folder: Path) -> list[str]:
    """Three files of random colours, which have to be resized."""
    rng, files = np.random.default_rng(3), [folder / f"{number}.png" for number in range(3)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(file)
    return list(map(str, files))


def latents(folder: Path) -> list[torch.Tensor]:
    entries = json.loads((folder / "samples.json").read_text())
    assert [entry["prompt"] for entry in entries] == ["a red fox", "a hen"]
    return [load_file(folder / entry["latent"])["latent"] for entry in entries]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_given_pictures_give_the_same_latents_on_every_layout(tmp_path: Path) -> None:
    script = tmp_path / "several.py"
    script.write_text(SCRIPT)
    alone, together = [], []
    for kind in KINDS:
        imports, generate = commands(kind, tmp_path / kind)
        alone += [*imports, [*generate, "--output_dir", f"{tmp_path}/{kind}/one"]]
        for name, flags in LAYOUTS.items():
            together += [[*generate, *flags, "--output_dir", f"{tmp_path}/{kind}/{name}"]]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for started, lines in (([], alone), (launcher, together)):
        # The script imports `recipes`, which no environment installs.
        env = {"PYTHONPATH": str(ROOT)}
        done = run([sys.executable, *started, str(script), json.dumps(lines)], timeout=500, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
    for kind in KINDS:
        one = latents(tmp_path / kind / "one")
        assert gap(*one) > 1e-2
        for name in LAYOUTS:
            found = latents(tmp_path / kind / name)
            gaps = [gap(ours, theirs) for ours, theirs in zip(found, one, strict=True)]
            assert max(gaps) <= 1e-5, (kind, name)
