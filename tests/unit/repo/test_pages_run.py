"""The pages' commands and those of `make quickstart` are run one after the other, made tiny."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.doc_commands import commands, pages, script_call
from tests.warm_python import warm_python

# Appended to each call of a script: the last value of an option counts.
TINY = {
    "recipes/pretrain_dit.py": [
        *("train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1"),
        *("checkpoint.save_interval=2", "scheduler.lr_warmup_iters=0", "model.num_layers=1"),
        *("dataset.num_workers=0", "dataset.packing_buffer_size=20"),
    ],
    "-m data_prep image": ["--minutes", "0"],
    "-m data_prep video": ["--minutes", "0"],
    "recipes/generate_dit.py": ["--num_steps", "2"],
    "recipes/evaluate_pictures.py": ["--num_steps", "2", "--count", "2"],
    "recipes/check_layouts.py": ["--layouts", "tp2"],
    "recipes/evaluate_digits.py": [
        *("--num_steps", "2", "--per_prompt", "1", "--min_accuracy", "0")
    ],
    "benchmarks/benchmark.py": ["--steps", "2", "--warm-up", "1"],
    "benchmarks/benchmark_loader.py": ["--samples", "200", "70", "--repeats", "1", "--memory", "8"],
    "benchmarks/benchmark_packing.py": [
        *("--samples", "128", "--ranks", "2", "--balance-packs", "8", "--steps", "4")
    ],
    "benchmarks/benchmark_writing.py": ["--samples", "50", "--repeats", "1"],
    "benchmarks/coloured_shapes.py": ["--pictures", "40", "--prompts", "4", "--min_accuracy", "0"],
    "benchmarks/count_traffic.py": ["--samples", "2", "--grid", "1", "4", "4", "--text", "3"],
    "benchmarks/compare_padded.py": [
        *("--steps", "1", "model.num_layers=1", "model.hidden_size=64"),
        *("model.num_attention_heads=2", "model.crossattn_emb_size=32"),
    ],
}
# What the tiny pipelines of the page of Wan need beside it.
WAN = {
    "recipes/pretrain_dit.py": [
        *("model.num_layers=2", "model.hidden_size=48", "model.num_attention_heads=4"),
        *("model.mlp_ratio=1.3333333333333333", "model.crossattn_emb_size=16"),
        *("model.freq_dim=16", "model.image_embed_size=16", "model.image_embed_length=5"),
        *("model.precision=fp32", "model.recompute_granularity=none"),
        *("model.tensor_model_parallel_size=1", "model.sequence_parallel=false"),
        *("train.global_batch_size=1", "dataset.task_encoder_seq_length=512"),
        *("validation.sampling_steps=2", "dataset.use_train_split_for_val=true"),
    ],
    "recipes/generate_dit.py": [
        *("--height", "32", "--width", "64", "--num_video_frames", "5"),
    ],
}
# A network that is given no picture.
OF_TEXT = [word for word in WAN["recipes/pretrain_dit.py"] if "image_embed" not in word]
TEXT_TO_VIDEO = WAN | {"recipes/pretrain_dit.py": OF_TEXT}

# Likewise of FLUX.
FLUX = {
    "recipes/pretrain_dit.py": [
        *("model.num_layers=2", "model.num_single_layers=2", "model.hidden_size=48"),
        *("model.num_attention_heads=4", "model.rope_axes=[4,4,4]", "model.in_channels=4"),
        *("model.crossattn_emb_size=16", "model.pooled_size=16", "model.precision=fp32"),
        *("model.recompute_granularity=none", "model.tensor_model_parallel_size=1"),
        *("model.sequence_parallel=false", "train.global_batch_size=1"),
        *("dataset.task_encoder_seq_length=1280", "dataset.use_train_split_for_val=true"),
    ],
    "recipes/generate_dit.py": ["--height", "32", "--width", "24"],
}
# Likewise of the way to eight GPUs: text to video, and a layout of one process. The page of
# Diffusers compares outputs.
EIGHT = TEXT_TO_VIDEO | {
    "-m dit.convert verify": ["--tensors-only"],
    "recipes/pretrain_dit.py": [
        *(word for word in OF_TEXT if "crossattn" not in word),
        "model.context_parallel_size=1",
    ],
}
# A python block makes a clip of this size.
SMALL = {'"height": 480': '"height": 32', '"width": 832': '"width": 32'}
SMALL |= {'"num_frames": 81': '"num_frames": 5', "num_inference_steps=30": "num_inference_steps=2"}
QWEN = {
    "recipes/pretrain_dit.py": [
        *("model.num_layers=2", "model.hidden_size=48", "model.num_attention_heads=4"),
        *("model.rope_axes=[4,4,4]", "model.crossattn_emb_size=16", "model.precision=fp32"),
        *("model.recompute_granularity=none", "train.global_batch_size=1"),
        *("dataset.task_encoder_seq_length=1280", "dataset.use_train_split_for_val=true"),
    ],
    "recipes/generate_dit.py": ["--height", "32", "--width", "48"],
}
HUNYUAN_VIDEO = {
    "recipes/pretrain_dit.py": [
        *("model.num_layers=2", "model.num_single_layers=2", "model.num_refiner_layers=1"),
        *("model.hidden_size=32", "model.num_attention_heads=2", "model.rope_axes=[4,4,8]"),
        *("model.mlp_ratio=2", "model.in_channels=4", "model.crossattn_emb_size=16"),
        *("model.pooled_size=16", "model.precision=fp32", "model.recompute_granularity=none"),
        *("dataset.task_encoder_seq_length=512", "dataset.use_train_split_for_val=true"),
    ],
    "recipes/generate_dit.py": [
        *("--height", "32", "--width", "48", "--num_video_frames", "5"),
    ],
}
HUNYUAN_15 = {
    "recipes/pretrain_dit.py": [
        *("model.num_layers=2", "model.num_refiner_layers=1", "model.hidden_size=32"),
        *("model.num_attention_heads=2", "model.rope_axes=[4,4,8]", "model.mlp_ratio=2"),
        *("model.in_channels=4", "model.crossattn_emb_size=16", "model.image_embed_size=16"),
        *("model.glyph_embed_size=16", "model.target_size=20", "model.precision=fp32"),
        *("model.recompute_granularity=none", "model.tensor_model_parallel_size=1"),
        *("model.sequence_parallel=false", "model.pipeline_model_parallel_size=1"),
        *("train.global_batch_size=1", "dataset.task_encoder_seq_length=1024"),
        "dataset.use_train_split_for_val=true",
    ],
    "recipes/generate_dit.py": HUNYUAN_VIDEO["recipes/generate_dit.py"],
}
STILL = {
    "recipes/pretrain_dit.py": [
        *("model.name=custom", "model.precision=fp32", "model.recompute_granularity=none"),
        *("dataset.task_encoder_seq_length=1024", "dataset.use_train_split_for_val=true"),
    ],
    "recipes/generate_dit.py": ["--height", "32", "--width", "32"],
}
"""Of pictures, where the sizes of the network are those of its folder."""


def still(*keys: str) -> dict[str, list[str]]:
    """`STILL` with keys of one family."""
    return STILL | {"recipes/pretrain_dit.py": [*STILL["recipes/pretrain_dit.py"], *keys]}


SD3 = still("model.family=sd3", "model.num_layers=3")
CHROMA = still("model.family=chroma", "model.num_layers=2")
HUNYUAN_IMAGE = still("model.family=hunyuan_image", "model.num_layers=2")
XL = {
    "recipes/pretrain_dit.py": [
        *("model.hidden_size=64", "model.num_attention_heads=4", "model.num_layers=2"),
        *("model.tensor_model_parallel_size=1", "model.recompute_granularity=none"),
        *("train.global_batch_size=2", "dataset.task_encoder_seq_length=512"),
        "dataset.use_train_split_for_val=true",
    ],
}
TINY_PAGES = {
    "conf/dit_xl_image.yaml": XL,
    **{"models/stable-diffusion": SD3, "runs/sd3_lora": SD3},
    **{"models/Chroma": CHROMA, "runs/chroma_lora": CHROMA},
    **{"models/HunyuanImage": HUNYUAN_IMAGE, "runs/hunyuanimage_lora": HUNYUAN_IMAGE},
    **{"runs/eight": EIGHT, "data/mixed": EIGHT},
    **{"models/Wan2.1-T2V": TEXT_TO_VIDEO, "models/Wan": WAN, "runs/wan": WAN},
    **{"models/FLUX": FLUX, "runs/flux_": FLUX},
    **{"models/Qwen": QWEN, "runs/qwen_image_lora": QWEN},
    **{"models/HunyuanVideo-1.5": HUNYUAN_15, "runs/hunyuan15_lora": HUNYUAN_15},
    **{"models/HunyuanVideo": HUNYUAN_VIDEO, "runs/hunyuanvideo_": HUNYUAN_VIDEO},
}
"""What a command names -> what makes it fit the tiny pipelines; the first that fits counts."""


@pytest.fixture
def workspace(tmp_path: Path, repo_root: Path) -> Path:
    """A folder like a fresh checkout, so that what the commands write is not left in ours."""
    for name in ("recipes", "benchmarks", "conf", "docs", "tests", "Makefile"):
        (tmp_path / name).symlink_to(repo_root / name)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "core").touch()
    return tmp_path


def run(line: str, folder: Path, *, warm: bool = True) -> str:
    """What a line prints; `python` is the one that runs this test, or a `warm_python` of it."""
    python = Path(warm_python() if warm else sys.executable)
    path = f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHON_EXEC": str(python)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tiny(words: tuple[str, ...]) -> str:
    """The line with the least work."""
    program, arguments = script_call(words) or ([], [])
    name = " ".join(program)
    extra = [] if "--dry-run" in arguments else TINY.get(name, [])
    if "--family" in arguments:
        extra = [*extra, "--nproc", "2", "--family", "wan2.1_t2v_1.3b"]
    own = (fits for place, fits in TINY_PAGES.items() if any(place in word for word in arguments))
    if (fits := next(own, None)) is not None:
        extra = [*extra, *fits.get(name, [])]
        alone = {"8": "1", "WORLD_SIZE=8": "WORLD_SIZE=1"}
        words = tuple(alone.get(word, word) for word in words)
    return shlex.join([*words, *extra])


def publish_wan(workspace: Path) -> None:
    """Tiny pipelines, videos and a picture where the page of Wan has large ones."""
    from tests import media_files
    from tests.wan_networks import random_wan
    from tests.wan_pipelines import NETWORKS, pipeline

    second: Any = {"transformer_2": random_wan(seed=1, **NETWORKS["i2v_2.2"])}
    second["boundary_ratio"] = 0.9
    for kind, name, more in (
        ("i2v_2.1", "Wan2.1-I2V-14B-480P-Diffusers", {}),
        ("i2v_2.2", "Wan2.2-I2V-A14B-Diffusers", second),
    ):
        pipeline(workspace / kind, kind, **more)
        (workspace / "models").mkdir(exist_ok=True)
        (workspace / kind / "pipeline").rename(workspace / "models" / name)
    for number in range(4):
        media_files.video(workspace / f"films/{number}.mp4", 9 + number)
    media_files.image(workspace / "photos/fox.png")


def publish_text_to_video(workspace: Path) -> None:
    """Tiny pipelines and twenty clips where the page of fine-tuning has large ones."""
    from tests import media_files
    from tests.wan_pipelines import pipeline

    models = workspace / "models"
    models.mkdir()
    pipeline(workspace / "t2v", "t2v")
    (workspace / "t2v/pipeline").rename(models / "Wan2.1-T2V-14B-Diffusers")
    small = models / "Wan2.1-T2V-1.3B-Diffusers"
    small.symlink_to(models / "Wan2.1-T2V-14B-Diffusers")
    for number in range(20):
        media_files.video(workspace / f"films/{number}.mp4", 9 + number % 4)
        (workspace / f"films/{number}.txt").write_text("a fox runs")


def publish_eight_gpus(workspace: Path) -> None:
    """Small clips and captions where the way to eight GPUs has large ones."""
    from tests import media_files

    for folder in ("films", "fox"):
        for number in range(4):
            media_files.video(workspace / folder / f"{number}.mp4", 9 + number)
            (workspace / folder / f"{number}.txt").write_text("a fox runs")


def publish_flux(workspace: Path) -> None:
    """A tiny pipeline where the page of FLUX has a large one."""
    from tests.flux_pipelines import pipeline

    pipeline(workspace / "dev", "dev")
    (workspace / "models").mkdir()
    (workspace / "dev" / "pipeline").rename(workspace / "models" / "FLUX.1-dev")


def publish_qwen_image(workspace: Path) -> None:
    """A tiny pipeline where the page of Qwen-Image has a large one."""
    from tests.qwen_pipelines import pipeline

    pipeline(workspace / "qwen", "qwen_image")
    (workspace / "models").mkdir()
    (workspace / "qwen" / "pipeline").rename(workspace / "models" / "Qwen-Image")


def publish_hunyuan_video(workspace: Path) -> None:
    """Tiny pipelines and clips where the page of HunyuanVideo has large ones."""
    from tests import media_files
    from tests.hunyuan_video_pipelines import pipeline

    pipeline(workspace / "i2v", "token_replace")
    pipeline(workspace / "t2v")
    (workspace / "models").mkdir()
    (workspace / "t2v" / "pipeline").rename(workspace / "models" / "HunyuanVideo")
    (workspace / "i2v" / "pipeline").rename(workspace / "models" / "HunyuanVideo-I2V")
    for number in range(2):
        media_files.video(workspace / f"films/{number}.mp4", 9)
    media_files.image(workspace / "photos/fox.png")


def publish_sd3(workspace: Path) -> None:
    """A tiny pipeline where the page of Stable Diffusion 3 has a large one."""
    from tests.sd3_pipelines import pipeline

    pipeline(workspace / "sd3")
    (workspace / "models").mkdir()
    (workspace / "sd3" / "pipeline").rename(workspace / "models" / "stable-diffusion-3.5-medium")


def publish_chroma(workspace: Path) -> None:
    """A tiny pipeline where the page of Chroma has a large one."""
    from tests.chroma_pipelines import pipeline

    pipeline(workspace / "chroma")
    (workspace / "models").mkdir()
    (workspace / "chroma" / "pipeline").rename(workspace / "models" / "Chroma1-HD")


def publish_hunyuan_image(workspace: Path) -> None:
    """A tiny pipeline where the page of HunyuanImage has a large one."""
    from tests.hunyuan_image_pipelines import pipeline

    pipeline(workspace / "hunyuanimage")
    (models := workspace / "models").mkdir()
    (workspace / "hunyuanimage" / "pipeline").rename(models / "HunyuanImage-2.1-Diffusers")


def publish_hunyuan_15(workspace: Path) -> None:
    """A tiny pipeline and clips where the page of HunyuanVideo 1.5 has large ones."""
    from tests import media_files
    from tests.hunyuan_pipelines import pipeline

    pipeline(workspace / "i2v", image=True)
    (models := workspace / "models").mkdir()
    (workspace / "i2v" / "pipeline").rename(models / "HunyuanVideo-1.5-Diffusers-480p_i2v")
    for number in range(2):
        media_files.video(workspace / f"films/{number}.mp4", 9)
        (workspace / f"films/{number}.txt").write_text('a fox with a sign "run"')
    media_files.image(workspace / "photos/fox.png")


def publish_shards(workspace: Path) -> None:
    """What the page of launching has packed before."""
    publish_photos(workspace / "photos", captions=False)
    packing = ("python", "-m", "data_prep", "image", "--image_dir", "photos")
    run(
        shlex.join(
            [*packing, "--output_dir", "data/photos", "--processor", "pixel", "--pixel_block", "8"]
        ),
        workspace,
    )
    provider = {"type": "file", "options": {"base_path": str(workspace / "store")}}
    profiles = {"profiles": {"store": {"storage_provider": provider}}}
    (workspace / "msc.yaml").write_text(json.dumps(profiles))


def publish_photos(photos: Path, *, captions: bool) -> None:
    """Forty squares, with captions beside them where the page refuses files without."""
    photos.mkdir(exist_ok=True)
    for i in range(40):
        colour = ("red", "green", "blue")[i % 3]
        image = Image.new("RGB", (16 + 8 * (i % 3), 16 + 8 * (i % 2)), colour)
        image.save(photos / f"a_{colour}_square_{i}.png")
        if captions:
            (photos / f"a_{colour}_square_{i}.txt").write_text(f"a {colour} square")


PUBLISH = {
    **{"wan.md": publish_wan, "fine_tuning.md": publish_text_to_video, "flux.md": publish_flux},
    **{"eight_gpus.md": publish_eight_gpus, "qwen_image.md": publish_qwen_image},
    **{"hunyuan_video.md": publish_hunyuan_video, "hunyuan_video_15.md": publish_hunyuan_15},
    **{"hunyuan_image.md": publish_hunyuan_image, "sd3.md": publish_sd3},
    **{"chroma.md": publish_chroma, "launching.md": publish_shards},
}
PAGES = [
    *("README.md", "first_run.md", "own_data.md", "objectives.md", "watching.md", "validation.md"),
    *("throughput.md", "diffusers.md", "coming_from.md", "two_cpu_cores.md", "wan.md"),
    *("flux.md", "fine_tuning.md", "eight_gpus.md", "qwen_image.md", "sd3.md", "chroma.md"),
    *(
        "families.md",
        "configuration_files.md",
        "developing.md",
        "launching.md",
        "troubleshooting.md",
    ),
    *("hunyuan_video.md", "hunyuan_video_15.md", "hunyuan_image.md", "small_data.md"),
]
BY_HAND = ("data/edits", "runs/edits")
"""Their text encoder needs torchvision, of which pip has no build for a torch without CUDA."""
COLD = ("README.md",)
"""Their every process begins as that of a user does."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_page_runs_from_top_to_bottom(repo_root: Path, workspace: Path, page: str) -> None:
    packing, _, training = _calls(repo_root, "first_run.md")[:3]
    if page in ("diffusers.md", "fine_tuning.md", "troubleshooting.md"):
        run(tiny(packing), workspace)
    if page in ("diffusers.md", "fine_tuning.md"):  # go on from the first run
        run(tiny(training), workspace)
    PUBLISH.get(page, lambda _: None)(workspace)
    publish_photos(workspace / "photos", captions=page == "eight_gpus.md")
    for words in _calls(repo_root, page):
        run(tiny(words), workspace, warm=page not in COLD)
    for block in re.findall(r"^```python\n(.*?)^```", _text(repo_root, page), re.DOTALL | re.M):
        for large, small in SMALL.items():
            block = block.replace(large, small)
        run(shlex.join(["python", "-c", block]), workspace)


def _text(repo_root: Path, page: str) -> str:
    return next(file for file in pages(repo_root) if file.name == page).read_text()


def _calls(repo_root: Path, page: str) -> list[tuple[str, ...]]:
    """The lines of a page that start a program of ours.

    The playground and a watched report serve until Ctrl-C; tests/distributed/test_generate.py asks
    the one, tests/unit/report/test_report_moves.py the other. Other tests run the Slurm file and
    the checks of layouts; containers and several machines are not here.
    """
    found = [command.words for command in commands(repo_root) if command.page == page]
    serve = {"dit.playground", "--watch", "sbatch", "docker", "--nnodes"}
    serve |= {"recipes/check_layouts.py"}
    found = [words for words in found if not any(name in w for name in BY_HAND for w in words)]
    return [words for words in found if script_call(words) and not serve & set(words)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layouts_are_checked_as_documented(repo_root: Path, workspace: Path) -> None:
    calls = [c.words for c in commands(repo_root) if "recipes/check_layouts.py" in c.words]
    assert calls
    for words in calls:
        assert "trainings agree with one process" in run(tiny(words), workspace)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_meet_as_documented(repo_root: Path, workspace: Path) -> None:
    """Two of them, both on this machine."""
    (words,) = (
        c.words for c in commands(repo_root) if "--nnodes" in c.words and "python" in c.words
    )
    publish_shards(workspace)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{free.getsockname()[1]}"
    two = {"4": "2", "$HEAD:29500": here}
    line = tiny(tuple(two.get(word, word) for word in words))
    run(f"{line} & first=$!; {line} && wait $first", workspace)
    (environment,) = (workspace / "runs/xl/environment.jsonl").read_text().splitlines()
    assert json.loads(environment)["layout"] == "data 2"
    assert len((workspace / "runs/xl/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_runs_to_the_page(workspace: Path) -> None:
    quoted = shlex.quote(f"PY={sys.executable}")
    planned = run(f"make --dry-run --no-print-directory {quoted} quickstart", workspace)
    for line in planned.replace("\\\n", " ").splitlines():
        words = tuple(shlex.split(line.replace(sys.executable, "python")))
        run(tiny(words) if words[0] == "python" else line, workspace, warm=False)
    digits = workspace / "runs" / "digits"
    for file in ("samples/grid.png", "report.html", "edm/metrics.jsonl"):
        assert (digits / file).stat().st_size > 0
    # Typed again, nothing is packed and no step is trained.
    steps = (digits / "edm" / "metrics.jsonl").read_text()
    again = run(f"make --dry-run --no-print-directory {quoted} quickstart", workspace)
    assert "data_prep" not in again and "recipes/pretrain_dit.py" in again
    assert steps.count("\n") == 2
