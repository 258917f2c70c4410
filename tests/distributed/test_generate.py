"""Pictures from a checkpoint: repeatable, independent of their neighbours, and written down."""

from __future__ import annotations

import base64
import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import fields
from http.client import HTTPConnection
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dit.sampling.commands.options import GenerationOptions
from tests.entering import Enter
from tests.launching import ROOT, SMALL, command, run

PROMPTS = ("a handwritten zero", "a handwritten seven", "a handwritten three", "x")


@pytest.fixture(scope="module")
def trained(enter: Enter, digits: Path, tmp_path_factory) -> Path:
    """Forty steps: the picture depends on the caption, and the average differs from the weights."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    conf = ("--config-file", ROOT / "conf/dit_digits.yaml", *SMALL, "dataset.num_workers=0")
    steps = ("train.train_iters=40", "train.global_batch_size=2", "train.eval_interval=0")
    places = (f"dataset.path={digits}", f"checkpoint.save={folder}")
    done = enter("pretrain_dit", *conf, *steps, *places, "optimizer.lr=5e-3")
    assert done.code == 0, done.said
    return folder


@pytest.fixture
def generate(enter: Enter, trained: Path, tmp_path_factory):
    """Pictures [N, H, W, 3] for prompts and flags, in a new folder that the function returns."""

    def call(*flags: object, prompts=PROMPTS) -> tuple[np.ndarray, Path]:
        folder = tmp_path_factory.mktemp("pictures")
        asked = [part for prompt in prompts for part in ("--prompt", prompt)]
        place = ("--checkpoint_path", trained, "--output_dir", folder)
        done = enter("generate_dit", *place, *asked, "--num_steps", 6, *flags)
        assert done.code == 0, done.said
        return _read(folder), folder

    return call


def _read(folder: Path) -> np.ndarray:
    entries = json.loads((folder / "samples.json").read_text())
    return np.stack([np.array(Image.open(folder / entry["file"])) for entry in entries])


def _distance(one: np.ndarray, other: np.ndarray) -> int:
    """Largest difference in grey levels."""
    return int(np.abs(one.astype(int) - other.astype(int)).max())


@pytest.mark.slow
def test_the_same_call_gives_the_same_pictures(generate):
    (one, _), (two, _) = generate(), generate()
    assert np.array_equal(one, two)
    other, _ = generate("--seed", 1)
    assert _distance(one, other) > 10


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["heun", "euler"])
def test_a_picture_does_not_depend_on_its_neighbours(generate, sampler):
    together, _ = generate("--sampler", sampler)
    for i, prompt in enumerate(PROMPTS):
        alone, _ = generate("--sampler", sampler, "--seed", i, prompts=(prompt,))
        assert _distance(alone[0], together[i]) <= 1
    among_others, _ = generate("--sampler", sampler, prompts=(*PROMPTS[:2], *[PROMPTS[3]] * 30))
    assert _distance(among_others[:2], together[:2]) <= 1


def test_weights_and_their_average_give_other_pictures(generate):
    average, folder = generate()
    last, _ = generate("--weights", "model")
    assert _distance(average, last) > 1
    assert {e["weights"] for e in json.loads((folder / "samples.json").read_text())} == {"ema"}


@pytest.mark.slow
def test_guidance_leads_away_from_the_negative_prompt(generate):
    strong = ("--guidance", 4)
    plain, _ = generate(*strong)
    negative, _ = generate(*strong, "--negative_prompt", PROMPTS[1])
    assert _distance(plain, negative) > 1
    unguided, _ = generate("--guidance", 1)
    ignored, _ = generate("--guidance", 1, "--negative_prompt", PROMPTS[1])
    assert np.array_equal(unguided, ignored)
    # Away from what is asked for is nowhere: c + g (c - c) is the prediction without guidance.
    itself, _ = generate(*strong, "--negative_prompt", PROMPTS[1], prompts=[PROMPTS[1]])
    alone, _ = generate("--guidance", 1, prompts=[PROMPTS[1]])
    assert _distance(itself, alone) <= 1


def test_everything_is_written_down(generate, trained):
    pictures, folder = generate("--seed", 5, "--height", 12, "--width", 10, "--guidance", 2)
    assert pictures.shape == (4, 12, 10, 3)
    entries = json.loads((folder / "samples.json").read_text())
    assert [entry["prompt"] for entry in entries] == list(PROMPTS)
    assert [entry["seed"] for entry in entries] == [5, 6, 7, 8]
    asked = {"height": 12, "width": 10, "num_video_frames": 1, "num_steps": 6, "guidance": 2.0}
    asked |= {"sampler": "heun", "weights": "ema", "negative_prompt": "", "fps": 24.0}
    asked |= {"guidance_interval": None, "guidance_rescale": 0.0, "guider": None}
    asked |= {"guidance_steps": 1.0, "guidance_least_norm": 0.0, "reference_guidance": 1.0}
    asked |= {"guidance_after": 1.0}
    asked |= {"image": [], "last_image": None, "distilled_guidance": None, "video": []}
    asked |= {"at_frame": [], "strength": [], "condition_noise": 0.0}
    asked |= {"reference": [], "reference_video": [], "reference_size": "target"}
    asked |= {"frames_of": None, "sound_of": None, "sigmas": [], "upsampler": None}
    asked |= {"upsampled_sigmas": [], "audio_guidance": None, "audio_guidance_rescale": None}
    asked |= {"stg_scale": 0.0, "audio_stg_scale": None, "stg_blocks": []}
    asked |= {"modality_scale": 1.0, "audio_modality_scale": None}
    asked |= {"precision": "fp32", "checkpoint": str(trained / "checkpoints/step_00000040")}
    assert {field.name for field in fields(GenerationOptions)} < asked.keys()
    for entry in entries:
        assert entry.items() >= asked.items()
        note = Image.open(folder / entry["file"]).text
        assert note["prompt"] == entry["prompt"]
        assert json.loads(note["settings"]) == {"seed": entry["seed"], **asked}
    assert Image.open(folder / "grid.png").width > 10


def test_every_name_of_a_checkpoint_and_a_file_of_prompts(generate, enter, trained, tmp_path):
    pictures, _ = generate()
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(["", *PROMPTS, ""]))
    for n, place in enumerate(("checkpoints/LATEST", "checkpoints/step_00000040")):
        flags = ("--prompts_file", file, "--num_steps", 6, "--video_save_path", tmp_path / str(n))
        done = enter("generate_dit", "--checkpoint_path", trained / place, *flags)
        assert done.code == 0, done.said
        assert "words that no caption of the training data has: x\n" in done.said
        assert np.array_equal(_read(tmp_path / str(n)), pictures)


def test_videos_are_generated_at_their_rate(enter, trained, tmp_path):
    size = ("--num_video_frames", 3, "--height", 8, "--width", 10, "--fps", 12)
    asked = ("--prompt", PROMPTS[0], "--num_steps", 2, *size, "--video_save_path", tmp_path)
    done = enter("generate_dit", "--checkpoint_path", trained, *asked)
    assert done.code == 0, done.said
    (entry,) = json.loads((tmp_path / "samples.json").read_text())
    assert (entry["file"], entry["fps"], entry["num_video_frames"]) == ("00000.mp4", 12.0, 3)
    with av.open(str(tmp_path / entry["file"])) as container:
        stream = container.streams.video[0]
        assert stream.average_rate == 12
        shapes = [frame.to_ndarray(format="rgb24").shape for frame in container.decode(stream)]
    assert shapes == [(8, 10, 3)] * 3


@pytest.mark.parametrize("sampler", ["heun", "unipc"])
def test_bfloat16_stays_close_to_float32(generate, sampler):
    """Matrix products lose all but 8 bits, a relative error of 1/256 each; levels lose none."""
    found = {}
    for precision in ("fp32", "bf16"):
        flags = ("--precision", precision, "--sampler", sampler, "--guidance", 2, "--save_latents")
        _, folder = generate(*flags)
        entries = json.loads((folder / "samples.json").read_text())
        assert {entry["precision"] for entry in entries} == {precision}
        files = [load_file(folder / entry["latent"]) for entry in entries]
        found[precision] = torch.stack([file["latent"] for file in files])
    apart = (found["bf16"] - found["fp32"]).square().mean().sqrt() / found["fp32"].std()
    assert 1e-4 < apart < 0.015  # measured: 0.0036 and 0.0045


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_pictures(generate, trained, tmp_path):
    pictures, _ = generate()
    asked = ["--checkpoint_path", str(trained), "--num_steps", "6"]
    asked += [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    plain = [sys.executable, str(ROOT / "recipes/generate_dit.py")]
    launched = command("generate_dit.py", nproc=2)
    for n, started in enumerate((plain, launched)):
        folder = tmp_path / str(n)
        done = run([*started, *asked, "--output_dir", str(folder)])
        assert done.returncode == 0, done.stdout + done.stderr
        assert _distance(_read(folder), pictures) <= 1


@pytest.mark.slow
def test_the_playground_gives_the_picture_of_the_command(generate, trained, tmp_path):
    (expected, *_), _ = generate("--seed", 5, "--guidance", 2, prompts=PROMPTS[3:])
    program = [sys.executable, "-m", "dit.playground", trained, trained, "--port", "0"]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(re.findall(r"127\.0\.0\.1:(\d+)/", server.stdout.readline())[0])
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            wish = {"prompt": PROMPTS[3], "seed": 5, "num_steps": 6, "guidance": 2, "variant": 1}
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/make", json.dumps(wish), kind)
            messages = [*map(json.loads, connection.getresponse().read().splitlines())]
            # Ctrl-C ends it in the middle of a wish, too.
            connection.request("POST", "/make", json.dumps(wish | {"num_steps": 500}), kind)
            connection.getresponse().readline()
        finally:
            server.send_signal(signal.SIGINT)
            said, _ = server.communicate(timeout=60)
    assert server.returncode == 0 and said == "closed\n"
    assert messages[-1]["note"] == "words that no caption of the training data has: x"
    assert [m["step"] for m in messages[:-1]] == [1, 2, 3, 4, 5, 6]
    shown = [_decoded(m.get("way") or m["picture"]) for m in messages]
    assert _distance(shown[-1], expected) == 0
    # The way leads there: what the network expects comes nearer with each half of the steps.
    gaps = [float(np.abs(one.astype(float) - expected).mean()) for one in shown[:-1]]
    assert gaps[0] > gaps[2] > gaps[5]


def _decoded(url: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2]))))
