"""What the contracts ask of a family: its networks in Diffusers, and how Diffusers calls them."""

# T packed tokens, C channels of a token, F frames, H rows, W columns, N samples

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn

from dit.batch import Grid, PackedBatch
from dit.config import ModelConfig
from dit.convert.diffusers_checkpoint import OUR_KEY
from dit.models.positions import unpatchify
from dit.models.registry import network_spec
from tests.packs import random_pack

LEVELS = (812.5, 0.0, 437.0, 999.0, 31.25)
"""1000 t of flow matching, one for each sample of a pack."""
GUIDANCE = 3.5
AXES = [(4, 4, 4), (2, 6, 6), (2, 2, 4), (8, 4, 2), (16, 6, 10)]
IMAGES, VIDEOS = ((1, 3, 5), (1, 2, 3), (1, 4, 1)), ((1, 3, 5), (3, 2, 3), (2, 4, 1))


Levels = Callable[[int, int], Tensor]
"""(number of steps, tokens of a picture) -> noise levels."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """How the commands of docs/FAMILY.md are run, on a tiny pipeline in the place of a download."""

    model: str
    """Folder of the pipeline in models/."""
    keys: Sequence[str] = ("model.num_layers=2",)
    """Overrides of the configuration, for the network that the family's `pipeline` makes."""
    inputs: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the family's `pipeline`."""
    edits: bool = False
    """Whether the page has pairs of pictures, in `before` and `after`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family's network in Diffusers."""

    network: Any
    """Its class."""
    tiny: Mapping[str, Any]
    """config.json of a tiny one."""
    parameters: Mapping[str, int]
    """Named size -> parameters of the published network."""
    configuration: Callable[[int], dict[str, Any]]
    """config.json of a number below `cases`, of the kinds of networks that the family has."""
    cases: int = 8
    quick: int = 3
    """How many of these `make test` has."""
    options: Callable[[int], dict[str, Any]] = lambda _: {}
    """Of `import_weights`."""
    kept: Callable[[int], dict[str, Any]] = lambda _: {}
    """Of a seed: keys that config.json of an export has and that of the published network lacks."""
    pack: Callable[[ModelConfig, int], PackedBatch]
    theirs: Callable[[nn.Module, PackedBatch, int, float, Any], Tensor]
    """(network, pack, number of a sample, level, our model) -> its output as rows of tokens."""
    levels: Callable[[int], Sequence[float]] = lambda _: LEVELS
    clean_level: float = 0.0
    """What networks are told of tokens without noise."""
    compares_given: bool = True
    """Whether the outputs for tokens without noise are Diffusers', too."""
    unread: Callable[[Any, str, PackedBatch], bool] = lambda *_: False
    """(our model, tensor of theirs, pack) -> nothing reads what it makes."""
    zero: tuple[str, ...] = ()
    """Patterns of tensors whose gradient is zero by mathematics, without norms of keys."""
    exportable: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the family's tiny networks with which Diffusers' class has them."""
    counted: Sequence[tuple[str, Mapping[str, Any]]]
    """Tiny sizes whose operations are counted, and more changes of them."""
    arguments: Callable[[Any], dict[str, Any]]
    """Our model -> what Diffusers' takes for a sample of `COUNTED` tokens, without numbers."""
    level: str = "timestep"
    """What Diffusers' network calls the level."""
    text_rows: Callable[[Mapping[str, Any]], int] = lambda a: a["encoder_hidden_states"].shape[1]
    """`arguments` -> rows of their text."""
    attended: int | None = None
    """Tokens that layers see of that sample; None: its own."""
    repeated: Callable[[Any], int] = lambda _: 0
    """Our model -> operations that Diffusers repeats for each token of it, of equal rows."""
    refused: Sequence[tuple[Mapping[str, Any], str]]
    """Settings of the family that cannot be, and words of the error."""
    grids: Sequence[Grid] = IMAGES
    """Of samples to train on."""
    trained: Mapping[str, Any] = field(default_factory=dict)
    """Changes of `tiny` of the network that is trained."""
    training: Sequence[str] = ()
    """Settings of a run that trains a published folder."""
    still: tuple[str, ...] = ()
    """Patterns of our weights that nothing reads: of the text in the last layer."""
    decayed: tuple[str, ...] = ()
    """Patterns of our weights that `grids` without sound do not read, so that they only decay."""
    adapted: Sequence[str] = ()
    """Linears beside the usual ones that an adapter of the contract has."""
    second_attention: str = "attn"
    """A block's attention of which the adapter of the keys has another rank."""
    comfyui: bool = False
    """Whether ComfyUI reads Diffusers' names, of any set of linears."""
    adapted_by: Mapping[str, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)
    """Classes of pipelines that load adapters, by name, and changes of `tiny` of their networks."""
    unread_comfyui: bool = False
    """Whether these pipelines read no file of ComfyUI."""
    published_levels: Mapping[str, Levels] = field(default_factory=dict)
    """Named size -> the noise levels of its pipeline."""
    page: Page | None = None
    """The page of the family, where it is its own and its network makes pictures."""
    their_operations: Callable[[Any, int, int], int] = lambda *_: 0
    """(our model, tokens, rows of text) -> operations that Diffusers has more than we do."""

    def random(self, *, seed: int = 0, **changes: Any) -> Any:
        """Diffusers' network with random weights everywhere; its own start has zeros and ones."""
        network = self.network(**{**self.tiny, **changes}).eval()
        fill_random(network, seed=seed)
        if kept := self.kept(seed):
            network.register_to_config(**{OUR_KEY: kept})
        return network


PICTURE: Grid = (1, 6, 4)
VIDEO: Grid = (3, 4, 6)
"""Frames, rows and columns of a latent."""
STEPS = 4
PROMPT, NEGATIVE = "a red fox & a hen", "blurry"
Texts = Mapping[str, Mapping[str, Tensor]]
"""`prompt`, `negative_prompt` -> what our encoder makes of them."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A pipeline that makes pictures or videos of texts."""

    pipeline: Callable[[Path], Any]
    """Its folder with random parts, `pipeline` in the one that it is given."""
    made_by: Callable[..., Tensor]
    """(pipeline, noise, texts, arguments of the call) -> latent [C, F, H, W]."""
    size: Grid = PICTURE
    channels: int = 4
    objective: Mapping[str, Any]
    """Keys of `objective`, or of its flow, that an import has."""
    encoded: Callable[[Any, Texts], Sequence[tuple[Tensor, Tensor]]] = lambda *_: ()
    """(pipeline, texts) -> pairs of our rows and those of its encoders, in bfloat16."""
    calls: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
    """Arguments of theirs and options of ours; each makes another picture than the first."""
    prompt: str = PROMPT
    negative: str = NEGATIVE
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ours in every call."""
    away: str | None = None
    """Folder of the network that guidance leads away from."""
    slow: bool = True


COUNTED: Grid = (3, 4, 5)
"""Patches of the sample whose operations are counted; those of pictures lie below each other."""
COUNTED_TEXT = 12


def fill_random(network: nn.Module, *, seed: int) -> None:
    """Norms near 1, biases near 0, matrices that keep the size of numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        wave = torch.randn(parameter.shape, generator=generator)
        norm = parameter.ndim == 1 and name.endswith("weight")
        spread = 0.2 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        with torch.no_grad():
            parameter.copy_(wave * spread + norm)


def parts_of(folder: Path, **kinds: Any) -> dict[str, Any]:
    """Parts of a pipeline by their classes; text encoders in the precision of shards, bfloat16."""
    return {
        name: kind.from_pretrained(
            folder / name, **{"torch_dtype": torch.bfloat16} if "text_encoder" in name else {}
        )
        for name, kind in kinds.items()
    }


def saved(opened: Any, folder: Path) -> Any:
    """A pipeline that shows no progress, in `folder`/pipeline."""
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened


def latents_made(pipe: Any, latents: Tensor, **call: Any) -> Tensor:
    """What a pipeline makes of its noise in four steps, as the noise is laid out."""
    call |= {"num_inference_steps": STEPS, "output_type": "latent", "return_dict": False}
    (found,) = pipe(latents=latents, **call)
    return found


def embeds_of(texts: Texts) -> dict[str, Tensor]:
    """Arguments of pipelines with a pooled text, in float32 as the network is.

    The pipeline's own are of the type of its text encoders.
    """
    found: dict[str, Tensor] = {}
    for name, text in texts.items():
        pooled = f"{name.removesuffix('prompt')}pooled_prompt_embeds"
        found |= {f"{name}_embeds": text["text"][None].float()}
        found[pooled] = text["pooled_text"][None].float()
    return found


def sides_of(noise_CFHW: Tensor, stride: int) -> dict[str, int]:
    """Rows and columns of a latent in pixels."""
    return {"height": noise_CFHW.shape[2] * stride, "width": noise_CFHW.shape[3] * stride}


def even_levels(num_steps: int, *, mu: float | None = None, **options: Any) -> Tensor:
    """Levels of Diffusers' scheduler with these settings, from 1 to 1 / `num_steps` evenly."""
    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
    return scheduler.sigmas


def levels_of(**options: Any) -> Levels:
    """`even_levels` with settings that do not depend on the size of a picture."""
    return lambda steps, _: even_levels(steps, **options)


def head_of_text(model: Any, _: int, rows: int) -> int:
    """Operations of a head that computes text, too, which nothing reads."""
    (text,) = network_spec(model).text([rows])
    return 2 * text * model.hidden_size * model.output_features


def text_of_last_layer(model: Any, _: int, rows: int) -> int:
    """Operations of the text of the last layer, which nothing reads."""
    (text,), width = network_spec(model).text([rows]), model.hidden_size
    return 2 * text * (width**2 + 2 * width * model.ffn_hidden_size)


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference over the root mean square of theirs."""
    return float((ours - theirs).abs().max() / theirs.square().mean().sqrt())


def latent_of(batch: PackedBatch, index: int, model: ModelConfig, rows: str = "latent_TC") -> Any:
    """The target of one sample, or its condition, as a latent [C, F, H, W]."""
    start, grid = batch.starts[index], batch.grids[index]
    x_TC = getattr(batch, rows)[start:]
    return unpatchify(x_TC, grid, model.patch_temporal, model.patch_spatial)


def rows_of(latent_CFHW: Tensor, model: ModelConfig) -> Tensor:
    """A latent as the rows of its tokens."""
    pt, p = model.patch_temporal, model.patch_spatial
    frames, height, width = latent_CFHW.shape[1:]
    split = latent_CFHW.reshape(-1, frames // pt, pt, height // p, p, width // p, p)
    return split.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, model.patch_features)


def text_of(batch: PackedBatch, index: int, name: str = "text") -> Tensor:
    """Rows of one sample [1, L, E]."""
    first, last = batch.text_offsets[name][index : index + 2]
    return batch.texts[name][None, first:last]


def last_text(*parts: str) -> Callable[[Any, str, PackedBatch], bool]:
    """Of double-stream blocks alone: nothing reads the text behind the last one."""

    def unread(model: Any, name: str, batch: PackedBatch) -> bool:
        last = name.startswith(f"transformer_blocks.{model.num_layers - 1}.")
        return last and any(part in name for part in parts)

    return unread


def shape_of(number: int, draw: random.Random) -> dict[str, Any]:
    """Heads and layers of a network of joint attention."""
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(AXES[number % len(AXES)]),
        "num_layers": draw.choice([1, 2, 3]),
    }


def mixed_pack(
    model: ModelConfig,
    number: int,
    grid: Callable[[random.Random], Grid],
    *,
    fps: Sequence[float] = (),
) -> PackedBatch:
    """Five samples of drawn grids, with captions of one row and of several."""
    draw, texts = random.Random(number), ([7, 1, 12, 3, 20], [1, 1, 5, 2, 1])
    told = GUIDANCE if getattr(model, "guidance_embed", False) else None
    grids = [grid(draw) for _ in range(5)]
    return random_pack(grids, texts[number % 2], model=model, guidance=told, fps=fps)


def picture(draw: random.Random) -> Grid:
    """Unequal sides."""
    return (1, draw.randint(1, 5), draw.randint(1, 5))


ONES_OF_REFINER = ("context_embedder.token_refiner.*.attn.to_k.bias",)
"""Biases of keys that are not normalised move nothing."""
TEXT_OF_LAST_BLOCK = ("attn.add_q_proj", "attn.to_add_out", "attn.norm_added_q")
UNREAD_TEXT = (
    "*.1.text_attention.linear_proj.*",
    "*.1.text_attention.q_layernorm.*",
    "*.1.text_mlp.*",
)
"""The same of our weights, in networks of two layers."""
