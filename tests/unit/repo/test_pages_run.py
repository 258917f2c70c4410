"""The pages' commands and those of `make quickstart` are run one after the other, made tiny."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from tests import media_files
from tests.doc_commands import blocks, commands, pages, script_call
from tests.families import wan
from tests.families.table import CASES
from tests.sound_files import SoundClip, make_clip
from tests.tables import table
from tests.warm_python import warm_python

SCRIPTS, NETWORKS = table(__file__, "programs"), table(__file__, "networks")
# A network that is given no picture.
OF_TEXT = [w for w in NETWORKS["wan"]["recipes/pretrain_dit.py"] if "image_embed" not in w]
TEXT_TO_VIDEO = NETWORKS["wan"] | {"recipes/pretrain_dit.py": OF_TEXT}

# On the way to eight GPUs: text to video, and a layout of one process. The page of Diffusers
# compares outputs.
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


def still(*keys: str) -> dict[str, list[str]]:
    """Of pictures, with keys of one family."""
    own = NETWORKS["still"]
    return own | {"recipes/pretrain_dit.py": [*own["recipes/pretrain_dit.py"], *keys]}


OF_FAMILIES = {name: case.page for name, case in CASES.items() if case.page is not None}
TINY_PAGES = {
    "conf/dit_xl_image.yaml": NETWORKS["xl"],
    **{
        place: still(f"model.family={name}", *page.keys)
        for name, page in OF_FAMILIES.items()
        for place in (f"models/{page.model}", f"runs/{name}_lora")
    },
    **dict.fromkeys(
        ("models/HunyuanImage", "runs/hunyuanimage_lora"),
        still("model.family=hunyuan_image", "model.num_layers=2"),
    ),
    **dict.fromkeys(("runs/eight", "data/mixed"), EIGHT),
    "models/Wan2.1-T2V": TEXT_TO_VIDEO,
    **dict.fromkeys(
        ("models/Anima", "runs/anima_lora"), still("model.family=dit", "model.num_layers=2")
    ),
    **dict.fromkeys(("models/Wan", "runs/wan"), NETWORKS["wan"]),
    **dict.fromkeys(("models/FLUX", "runs/flux_"), NETWORKS["flux"]),
    **dict.fromkeys(("models/Qwen", "runs/qwen_image_lora"), NETWORKS["qwen"]),
    **dict.fromkeys(("models/HunyuanVideo-1.5", "runs/hunyuan15_lora"), NETWORKS["hunyuan_15"]),
    "runs/ltx": {
        "recipes/pretrain_dit.py": [
            *(
                "model.name=custom",
                "model.family=ltx",
                "model.precision=fp32",
                "lora.rank=2",
                "model.num_layers=2",
            ),
            *("model.recompute_granularity=none", "dataset.use_train_split_for_val=true"),
        ],
        "recipes/generate_dit.py": ["--height", "32", "--width", "64", "--num_steps", "2"],
    },
    **dict.fromkeys(("models/HunyuanVideo", "runs/hunyuanvideo_"), NETWORKS["hunyuan_video"]),
}
"""What a command names -> what makes it fit the tiny pipelines; the first that fits counts."""


@pytest.fixture
def workspace(tmp_path: Path, repo_root: Path) -> Path:
    """A folder like a fresh checkout, so that what the commands write is not left in ours."""
    for name in ("recipes", "benchmarks", "examples", "conf", "docs", "tests", "Makefile"):
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
    extra = [] if "--dry-run" in arguments else SCRIPTS.get(name, [])
    if "--family" in arguments:
        extra = [*extra, "--nproc", "2", "--family", "wan2.1_t2v_1.3b"]
    if "--teacher" in arguments:
        extra = [*extra, "--teacher_per_prompt", "1"]
    own = (fits for place, fits in TINY_PAGES.items() if any(place in word for word in arguments))
    if (fits := next(own, None)) is not None:
        extra = [*extra, *fits.get(name, [])]
        alone = {"8": "1", "WORLD_SIZE=8": "WORLD_SIZE=1"}
        words = tuple(alone.get(word, word) for word in words)
    if words[-2:-1] == (">",):
        return f"{shlex.join([*words[:-2], *extra])} > {words[-1]}"
    return shlex.join([*words, *extra])


PIPELINES: dict[str, dict[str, tuple[str, tuple, dict]]] = {
    **{
        f"{name}.md": {page.model: (name, tuple(page.inputs), dict(page.options))}
        for name, page in OF_FAMILIES.items()
    },
    "wan.md": {
        "Wan2.1-I2V-14B-480P-Diffusers": ("wan", ("i2v_2.1",), {}),
        "Wan2.2-I2V-A14B-Diffusers": ("wan", ("i2v_2.2",), {"boundary_ratio": 0.9}),
    },
    "fine_tuning.md": {
        "Wan2.1-T2V-14B-Diffusers": ("wan", ("t2v",), {}),
        "Wan2.1-T2V-1.3B-Diffusers": ("wan", ("t2v",), {}),
    },
    "flux.md": {"FLUX.1-dev": ("flux", ("dev",), {})},
    "qwen_image.md": {"Qwen-Image": ("qwen_image", ("qwen_image",), {})},
    "hunyuan_video.md": {
        "HunyuanVideo": ("hunyuan_video", (), {}),
        "HunyuanVideo-I2V": ("hunyuan_video", ("token_replace",), {}),
    },
    "hunyuan_video_15.md": {
        "HunyuanVideo-1.5-Diffusers-480p_i2v": ("hunyuan_video_15", (), {"image": True}),
    },
    "hunyuan_image.md": {"HunyuanImage-2.1-Diffusers": ("hunyuan_image", (), {})},
    "anima.md": {"Anima": ("anima", (), {})},
    "ltx.md": {"LTX-Video-0.9.5": ("ltx", ("LTXConditionPipeline",), {})},
}
"""Page -> folder in models/ -> the file of tests/families whose `pipeline` fills it, its inputs."""
CLIPS: dict[str, tuple[tuple[str, ...], int, str | None]] = {
    "wan.md": (("films",), 4, None),
    "fine_tuning.md": (("fox",), 20, "a fox runs"),
    "eight_gpus.md": (("films", "fox"), 4, "a fox runs"),
    "hunyuan_video.md": (("films",), 2, None),
    "ltx.md": (("films", "after", "before"), 2, None),
    "hunyuan_video_15.md": (("films",), 2, 'a fox with a sign "run"'),
}
"""Page -> folders, number of clips in each, their caption."""
PAIRS = {f"{name}.md": ("before", "after") for name, page in OF_FAMILIES.items() if page.edits}
"""Page -> folders of a picture each, of the same name."""


def publish(page: str, workspace: Path) -> None:
    """Tiny pipelines and clips where a page has large ones."""
    for name, (family, inputs, more) in PIPELINES.get(page, {}).items():
        (workspace / "models").mkdir(exist_ok=True)
        if "boundary_ratio" in more:
            more = more | {"transformer_2": wan.random_wan(seed=1, **wan.NETWORKS["i2v_2.2"])}
        import_module(f"tests.families.{family}").pipeline(workspace / name, *inputs, **more)
        (workspace / name / "pipeline").rename(workspace / "models" / name)
    for number, folder in enumerate(PAIRS.get(page, ())):
        media_files.image(workspace / folder / "0.png", 32, 32, seed=number)
    folders, count, caption = CLIPS.get(page, ((), 0, None))
    for file in (workspace / folder / str(n) for folder in folders for n in range(count)):
        media_files.video(file.with_suffix(".mp4"), 9 + int(file.name) % 4)
        if caption is not None:
            file.with_suffix(".txt").write_text(caption)
    if page in PIPELINES:
        media_files.image(workspace / "photos/fox.png")
    if page == "sound.md":
        (workspace / "films").mkdir()
    for number in range(20 if page == "sound.md" else 0):
        clip = make_clip(workspace / "films" / f"{number}.mp4", SoundClip(end=1.2, white=0.4))
        clip.with_suffix(".txt").write_text("a flash")


def publish_shards(workspace: Path) -> None:
    """What the page of launching has packed before."""
    publish_photos(workspace / "photos", captions=False)
    words = "--output_dir data/photos --processor pixel --pixel_block 8 --minutes 0"
    run(f"python -m data_prep image --image_dir photos {words}", workspace)
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


PAGES = [
    *("README.md", "first_run.md", "own_data.md", "objectives.md", "watching.md", "validation.md"),
    *("throughput.md", "diffusers.md", "coming_from.md", "two_cpu_cores.md", "wan.md"),
    *("flux.md", "fine_tuning.md", "eight_gpus.md", "qwen_image.md", "anima.md", "ltx.md"),
    *("hunyuan_video.md", "hunyuan_video_15.md", "hunyuan_image.md", "small_data.md"),
    *("families.md", "configuration_files.md", "developing.md", "launching.md", "loader.md"),
    *("troubleshooting.md", "training_cost.md", "distilled.md", "preferences.md", "few_steps.md"),
    *("sound.md", "small_figures.md", "ltx2.md"),
    *("launching_reference.md", "throughput_reference.md", "throughput_figures.md"),
    *(f"{name}.md" for name in OF_FAMILIES),
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
    publish(page, workspace)
    if page.startswith("launching"):
        publish_shards(workspace)
    publish_photos(workspace / "photos", captions=page == "eight_gpus.md")
    for name, text in blocks(_page(repo_root, page), "toml").items():
        (workspace / name).write_text(text)
    for words in _calls(repo_root, page):
        run(tiny(words), workspace, warm=page not in COLD)
    for block in re.findall(
        r"^```python\n(.*?)^```", _page(repo_root, page).read_text(), re.DOTALL | re.M
    ):
        for large, small in SMALL.items():
            block = block.replace(large, small)
        run(shlex.join(["python", "-c", block]), workspace)


def _page(repo_root: Path, name: str) -> Path:
    return next(file for file in pages(repo_root) if file.name == name)


def _calls(repo_root: Path, page: str) -> list[tuple[str, ...]]:
    """The lines of a page that start a program of ours.

    The playground and a watched report serve until Ctrl-C; tests/distributed/test_generate.py asks
    the one, tests/unit/report/test_report_moves.py the other. Other tests run the Slurm file, the
    checks of layouts and expected_step.py, which the page gives no arguments; containers and
    several machines are not here.
    """
    found = [command.words for command in commands(repo_root) if command.page == page]
    serve = {"dit.playground", "--watch", "sbatch", "docker", "--nnodes"}
    serve |= {"recipes/check_layouts.py", "benchmarks/expected_step.py"}
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
