"""Clips with sound of LTX-2 beside Diffusers' pipelines, from the same noise and captions."""

# C channels, F frames, H rows, W columns of a latent; K channels, A frames of that of a sound

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler as Scheduler
from diffusers import (
    LTX2ConditionPipeline,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2Pipeline,
)
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition as of_conditions
from diffusers.pipelines.ltx2 import pipeline_ltx2_ic_lora as in_context
from PIL import Image
from torch import Tensor

from dit.command_line import option_names
from dit.config import Sampler
from dit.convert.import_ import import_weights
from dit.distributed.model_parallel import FullForward
from dit.lora.files import write_lora
from dit.models.registry import family_of
from dit.sampling.commands.lora_option import add_adapters
from dit.sampling.conditions.sound import JointStreams, SoundRequest, sound_frames
from dit.sampling.conditions.stream_scales import StreamGuidance
from dit.sampling.generate import Generated, Request, SamplingSettings, generate_streams
from dit.train.checkpoint.state_dict import load_weights
from tests.families import ltx2
from tests.families.case import gap
from tests.families.pipeline_parts import ltx2_vaes
from tests.lora_files import linears, random_factors

SIZE, FPS, STEPS = (3, 4, 6), 12.0, 4
PIXELS = {"num_frames": 17, "height": 128, "width": 192, "frame_rate": FPS}
NETWORK = {"in_channels": 8, "out_channels": 8, "audio_in_channels": 16, "audio_out_channels": 16}
SCHEDULER = {
    **{"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05},
    **{"base_image_seq_len": 1024, "max_image_seq_len": 4096, "shift_terminal": 0.1},
}


class Connected(torch.nn.Module):
    """What connectors make of the negative prompt and of the prompt, or of the latter alone."""

    def __init__(self, texts: dict[str, dict[str, Tensor]]):
        super().__init__()
        self.texts = texts
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        kinds = ["negative", "inputs"][-len(states) :]
        text, heard = (
            torch.stack([self.texts[kind][name] for kind in kinds])
            for name in ("text", "sound_text")
        )
        return text, heard, torch.ones(text.shape[:2])


def texts_of(model: Any) -> dict[str, dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    widths = {"text": model.crossattn_emb_size, "sound_text": model.sound_text_size}
    return {
        kind: {name: torch.randn(7, width, generator=rng) for name, width in widths.items()}
        for kind in ("negative", "inputs")
    }


@pytest.fixture(scope="module", params=["2.0", "2.3"])
def made(request: Any, groups: Any, tmp_path_factory: Any) -> tuple[Any, Any, Any]:
    """A pipeline without text encoder, our network with its weights, and the run of it."""
    folder = tmp_path_factory.mktemp("ltx2")
    none = dict.fromkeys(("text_encoder", "tokenizer", "connectors", "vocoder"))
    # The network of 2.0 can leave out attention, too, though its published file does not say so.
    version = {**ltx2.VERSIONS[request.param], "perturbed_attn": True}
    pipe = LTX2Pipeline(
        transformer=ltx2.CASE.random(seed=4, **NETWORK, **version),
        scheduler=Scheduler(**SCHEDULER),
        **ltx2_vaes(),
        **none,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe, *imported(pipe, groups, folder)


def imported(pipe: Any, groups: Any, folder: Path) -> tuple[FullForward, Any]:
    """Our network with the weights of a pipeline, and its run."""
    pipe.save_pretrained(folder / "pipeline")
    done = import_weights(folder / "pipeline", folder / "ours")
    network: Any = family_of(done.config.model).network()(done.config.model, groups)
    load_weights(done.path, [network], groups, averaged=False)
    return FullForward([network.eval()]), done.config


def start(config: Any) -> tuple[Tensor, Tensor]:
    """Noise of the latent [C, F, H, W] and of the sound [K, A]."""
    rng = torch.Generator().manual_seed(5)
    frames = sound_frames(config.model, frames=PIXELS["num_frames"], fps=FPS)
    return torch.randn(8, *SIZE, generator=rng), torch.randn(16, frames, generator=rng)


def first_frame() -> Tensor:
    """A whitened latent [C, 1, H, W] of a first frame that is given."""
    return torch.randn(8, 1, *SIZE[1:], generator=torch.Generator().manual_seed(6))


GIVEN = {
    "nothing": LTX2Pipeline,
    "first frame": LTX2ImageToVideoPipeline,
    "condition": LTX2ConditionPipeline,
    "reference": LTX2InContextPipeline,
}
"""What a sample shows from the start, and the pipeline of it."""


@torch.no_grad()
def theirs(pipe: Any, config: Any, *, given: str = "nothing", **call: Any) -> Generated:
    """Whitened latents of a pipeline."""
    noise_CFHW, noise_KA = start(config)
    mean, std = pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std
    pipe.register_modules(connectors=Connected(texts_of(config.model)))
    states = {
        f"{prefix}prompt_{name}": value
        for prefix in ("", "negative_")
        for name, value in (("embeds", torch.zeros(1, 7, 4)), ("attention_mask", torch.ones(1, 7)))
    }
    pipe = GIVEN[given].from_pipe(pipe)
    pipe.set_progress_bar_config(disable=True)
    picture = Image.new("RGB", (8, 8))  # in whose place our latent is taken
    if given == "first frame":
        noise_CFHW = torch.cat([first_frame(), noise_CFHW[:, 1:]], dim=1)
        call["image"] = picture
    whitening = pipe.vae.latents_mean, pipe.vae.latents_std, pipe.vae.config.scaling_factor
    # The pipelines whiten what they are given.
    call["latents"] = pipe._denormalize_latents(noise_CFHW[None], *whitening)
    call["audio_latents"] = pipe._denormalize_audio_latents(noise_KA.T[None], mean, std)
    if given == "reference":
        call |= {"latents": None, "audio_latents": None}
    with ExitStack() as replaced:
        if given == "condition":
            shown = pipe._denormalize_latents(first_frame()[None], *whitening)
            noise = {1: pipe._pack_latents(noise_CFHW[None]), 0: noise_KA.T[None]}
            of_shape = {tuple(one.shape): one for one in noise.values()}
            for name, function in (
                ("retrieve_latents", lambda *_, **__: shown),
                ("randn_tensor", lambda shape, **_: of_shape[tuple(shape)].clone()),
            ):
                replaced.enter_context(patch.object(of_conditions, name, function))
            condition = of_conditions.LTX2VideoCondition(frames=picture, crf=0)
            call |= {"conditions": [condition], "latents": None, "audio_latents": None}
        video, heard = pipe(
            **{**PIXELS, **states, "num_inference_steps": STEPS, **call},
            output_type="latent",
            return_dict=False,
        )
    video = pipe._normalize_latents(video, *whitening)
    rows = pipe._normalize_audio_latents(pipe._pack_audio_latents(heard), mean, std)
    return Generated(video[0], rows[0].T)


def ours(
    network: Any,
    config: Any,
    *,
    given: str = "nothing",
    references: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> Generated:
    noise_CFHW, noise_KA = start(config)
    texts = texts_of(config.model)
    texts["inputs"] |= references or {}
    if given != "nothing":
        texts["inputs"]["first_frame_latent"] = first_frame()
    request = Request(
        **texts,
        latent_FHW=SIZE,
        fps=FPS,
        seed=0,
        sound=SoundRequest(frames=noise_KA.shape[1]),
    )

    def drawn(streams: JointStreams, *_: Any) -> Tensor:
        found_TC = torch.zeros_like(streams.row.latent_TC)
        video, tokens = streams.pack, noise_CFHW[0].numel()
        found_TC[:tokens, :8] = noise_CFHW.flatten(1).T
        first = len(video.segment_T)
        found_TC[first : first + noise_KA.shape[1], :16] = noise_KA.T
        return found_TC

    names = option_names(StreamGuidance)
    more = StreamGuidance(**{name: settings.pop(name) for name in names if name in settings})
    told = SamplingSettings(num_steps=STEPS, sampler=Sampler.EULER, of_streams=more, **settings)
    with patch.object(JointStreams, "noise", drawn):
        (found,) = generate_streams(network, [request], config=config, settings=told)
    return found


OFF = {
    **{"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0},
    **{"audio_guidance_scale": 1.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0},
    "audio_guidance_rescale": 0.0,
}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "text": (
        {"guidance_scale": 3.0, "audio_guidance_scale": 3.0, "guidance_rescale": 0.7},
        # Diffusers takes a rescale of 0 for the sound as "that of the frames".
        {"guidance": 3.0, "guidance_rescale": 0.7},
    ),
    "layers": (
        {"stg_scale": 1.0, "audio_stg_scale": 0.5, "spatio_temporal_guidance_blocks": [1]},
        {"stg_scale": 1.0, "audio_stg_scale": 0.5, "stg_blocks": (1,)},
    ),
    "streams": (
        {"modality_scale": 3.0, "audio_modality_scale": 2.0},
        {"modality_scale": 3.0, "audio_modality_scale": 2.0},
    ),
    "all": (
        {
            **{"guidance_scale": 3.0, "audio_guidance_scale": 7.0, "stg_scale": 1.0},
            **{"audio_stg_scale": 1.0, "spatio_temporal_guidance_blocks": [0, 1]},
            **{"modality_scale": 3.0, "audio_modality_scale": 3.0},
            **{"guidance_rescale": 0.7, "audio_guidance_rescale": 0.5},
        },
        {
            **{"guidance": 3.0, "audio_guidance": 7.0, "stg_scale": 1.0, "stg_blocks": (0, 1)},
            **{"modality_scale": 3.0, "guidance_rescale": 0.7, "audio_guidance_rescale": 0.5},
        },
    ),
}


def assert_same(found: Generated, wanted: Generated) -> None:
    assert found.sound_KA is not None and wanted.sound_KA is not None
    assert gap(found.latent_CFHW, wanted.latent_CFHW) <= 1e-4
    assert gap(found.sound_KA, wanted.sound_KA) <= 1e-4


@pytest.mark.parametrize(
    ("given", "kind"),
    [(given, kind) for given in ("nothing", "first frame") for kind in CALLS]
    + [("condition", kind) for kind in ("none", "all")],
)
def test_latents_of_both_streams_are_those_of_the_pipeline(made, given: str, kind: str) -> None:
    pipe, network, config = made
    call, settings = CALLS[kind]
    found = ours(network, config, given=given, **settings)
    assert_same(found, theirs(pipe, config, given=given, **{**OFF, **call}))


def test_an_adapter_changes_the_pipeline_as_our_network(made, groups: Any, tmp_path: Path) -> None:
    """A file that we write, of every linear.

    Without guidance: Diffusers rounds timesteps to other float32 numbers than we do, and all kinds
    of guidance together enlarge what these weights make of that to 1.6e-4.
    """
    pipe, before, _ = made
    network, config = imported(pipe, groups, tmp_path)
    factors = random_factors(linears(pipe.transformer), alphas={"to_q": 2.0})
    (file := tmp_path / "lora").mkdir()
    write_lora(file, factors)
    add_adapters(network.first, [str(file)], option="--lora")
    found = ours(network, config)
    pipe.load_lora_weights(str(file))
    try:
        assert_same(found, theirs(pipe, config, **OFF))
    finally:
        pipe.unload_lora_weights()
    assert gap(ours(before, config).latent_CFHW, found.latent_CFHW) > 1e-2


@torch.no_grad()
def theirs_beside(
    pipe: Any, config: Any, pixels_FCHW: Tensor, scale: int, **call: Any
) -> tuple[Generated, Tensor]:
    """Whitened latents of the pipeline with a reference video, and the reference's latent."""
    noise_CFHW, noise_KA = start(config)
    tokens, of_shift = prod(SIZE), in_context.calculate_shift

    def drawn(shape: Any, **_: Any) -> Tensor:
        """Noise of a sound, or of a video, in front of noise of references, which has no effect."""
        if shape[-1] == len(noise_KA):
            return noise_KA.T[None]
        return torch.cat([noise_CFHW.flatten(1).T, torch.ones(shape[1] - tokens, 8)])[None]

    shown = in_context.LTX2ReferenceCondition(frames=pixels_FCHW)
    with (
        patch.object(in_context, "randn_tensor", drawn),
        # It counts references, too; Lightricks' trainer and we do not.
        patch.object(in_context, "calculate_shift", lambda _, *line: of_shift(tokens, *line)),
    ):
        told = {"reference_conditions": [shown], "reference_downscale_factor": scale}
        found = theirs(pipe, config, given="reference", **told, **call)
    vae = pipe.vae
    latent = vae.encode(2 * pixels_FCHW.transpose(0, 1)[None] - 1).latent_dist.mode()
    return found, pipe._normalize_latents(latent, vae.latents_mean, vae.latents_std)[0]


@pytest.mark.parametrize(("kind", "scale"), [("none", 1), ("text", 2)])
def test_latents_beside_a_reference_are_those_of_the_pipeline(made, kind: str, scale: int) -> None:
    pipe, network, config = made
    size = (PIXELS["num_frames"], 3, PIXELS["height"] // scale, PIXELS["width"] // scale)
    pixels_FCHW = torch.rand(size, generator=torch.Generator().manual_seed(6))
    call, settings = CALLS[kind]
    # The pipeline's rescale takes the deviation of references, too, and ours does not.
    call, settings = call | {"guidance_rescale": 0.0}, settings | {"guidance_rescale": 0.0}
    wanted, latent = theirs_beside(pipe, config, pixels_FCHW, scale, **{**OFF, **call})
    model = replace(config.model, reference_latents=1, reference_scale=scale)
    config = replace(config, model=model)
    found = ours(network, config, references={"reference_latent_0": latent}, **settings)
    assert_same(found, wanted)
    other = ours(network, config, references={"reference_latent_0": -latent}, **settings)
    assert gap(other.latent_CFHW, found.latent_CFHW) > 1e-2
