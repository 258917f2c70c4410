"""Example code of a card: Python that makes one picture or clip with the export.

For latents of a published VAE the code calls a pipeline of Diffusers. No pipeline decodes latents
of the codec `pixel`, so for these it is a loop over a scheduler's steps, with this project's
encoders.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from dit.codecs.vae import codec_named, usual_size
from dit.codecs.vae.autoencoder import Autoencoder
from dit.config import FlowConfig, FlowPrediction, RunConfig, SamplingLevels, TimeShift
from dit.models.diffusers.form import DIFFUSERS, Companion, PartBeside, Pipeline
from dit.models.registry import diffusers_form, family_of
from dit.objectives.diffusers_schedulers import EDM_SCHEDULER
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.registry import REGISTRY

DATA_CARD = "dataset_card.json"
"""File that code with a loop reads: how captions were encoded, and how latents are decoded."""
HUB = re.compile(r"[\w.-]+/[\w.-]+")
_COPIED = ("format_version", "processor", "text_encoder", "latent")
_GIVEN = ("ImageToVideo", "VideoToWorld", "Kontext", "Edit")
"""Words in the names of pipelines with a picture as input."""
_STEPS = 35
_TRANSFORMER = "transformer"
_HALF = "torch_dtype=torch.bfloat16"
_LOOP = """\
import json
import torch
from diffusers import {network}, {scheduler}
from PIL import Image
from dit.codecs import text, vae  # of megatron-dit, which encoded the data

place = {place}
network = {network}.from_pretrained(place)
{adapted}scheduler = {scheduler}.from_pretrained(place)
scheduler.set_timesteps({levels})
card = json.load(open(f"{{place}}/{data_card}"))
texts = text.text_encoder_of_card(card).encode_all({prompt})
caption = texts["text"][None].float()
{padded}x = {start}
with torch.no_grad():
    for t in scheduler.timesteps:
        state = {state}
{call}
        x = scheduler.step(made, t, x).prev_sample
pictures = vae.codec_of_card(card).decode(x[0]{scale}).numpy()
Image.fromarray(pictures[0]).save("picture.png")"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureCode:
    """Example code of an export's card, which makes a picture with Diffusers."""

    config: RunConfig
    card: dict[str, Any]  # of the data; empty where it is not known
    prompt: str = "a prompt"
    base: str = "BASE"  # folder or hub name of the base model or its pipeline
    adapters: bool = False  # whether the export holds adapters of `base`
    whole: bool = False  # whether it is a whole pipeline

    @property
    def text(self) -> str:
        """The code as text; FOLDER in it stands for the folder of the export."""
        if self.loops:
            return self._loop()
        any_kind = self.whole and not self._known.modular and self._known.module == DIFFUSERS
        kind = "DiffusionPipeline" if any_kind else self._pipeline
        return self._loaded() if kind is None else "\n".join(self._piped(kind))

    @property
    def loops(self) -> bool:
        """Whether the code is a loop over sampling steps, and reads the export's data card."""
        sized = len(usual_size(self.card)) >= 3
        return self._of_pixels and sized and None not in (self._scheduler, self._call)

    def data_card(self) -> bytes:
        """The part of the dataset card that the code reads, as JSON without any path."""
        kept = {name: self.card[name] for name in _COPIED if name in self.card}
        return json.dumps(kept, indent=1).encode() + b"\n"

    @property
    def _of_pixels(self) -> bool:
        name = str(self.card.get("processor", {}).get("name", "unknown"))
        return name != "unknown" and not issubclass(codec_named(name), Autoencoder)

    @property
    def _pipeline(self) -> str | None:
        """Class name of the Diffusers pipeline with the inputs that the network was trained with.

        The result is None if Diffusers has no such pipeline.
        """
        model, objective = self.config.model, self.config.objective
        if self._of_pixels or objective.prediction is not FlowPrediction.VELOCITY:
            return None
        if diffusers_form(model).beyond(model) is not None:
            return None
        known = diffusers_form(model).pipelines.items()
        fitting = (
            k for k, one in known if one.samples == objective.name and not one.misfits(model)
        )
        return next(fitting, None)

    @property
    def _known(self) -> Pipeline:
        known = diffusers_form(self.config.model).pipelines
        return Pipeline() if self._pipeline is None else known[self._pipeline]

    @property
    def _network(self) -> str:
        return diffusers_form(self.config.model).class_name

    @property
    def _call(self) -> str | None:
        return diffusers_form(self.config.model).call(self.config.model)

    @property
    def _scheduler(self) -> str | None:
        """Class name of Diffusers' scheduler for this objective; None if there is none."""
        objective = self.config.objective
        opened = REGISTRY[objective.name].scheduler
        if opened is None or opened().inexpressible(objective) is not None:
            return None
        return opened().content(objective)["_class_name"]

    @property
    def _second(self) -> Companion | None:
        return diffusers_form(self.config.model).written_companion(self.config.model)

    def _adapted(self, network: str, prefix: str = _TRANSFORMER) -> str:
        return f'{network}.load_lora_adapter("FOLDER", prefix="{prefix}", use_safetensors=True)'

    def _all_adapted(self) -> list[str]:
        """Lines of code that load the adapters into each transformer of a pipeline."""
        names = [_TRANSFORMER] + ([] if self._second is None else [self._second.folder])
        return [self._adapted(f"pipe.{name}", name) for name in names]

    def _loaded(self) -> str:
        """Lines of code that load only the network, if no pipeline or short loop can run it."""
        place = json.dumps(self.base if self.adapters else "FOLDER")
        module = diffusers_form(self.config.model).module
        lines = [f"from {module} import {self._network}"]
        lines += [f"network = {self._network}.from_pretrained({place})"]
        return "\n".join(lines + [self._adapted("network")] * self.adapters)

    def _piped(self, kind: str) -> list[str]:
        """Lines of code that load the pipeline `kind` with the export, and call it once."""
        half, place = _HALF, json.dumps("FOLDER" if self.whole else self.base)
        own = not (self.whole or self.adapters)
        second = self._second if own else None
        opened = [f'network = {self._network}.from_pretrained("FOLDER", {half})'] * own
        if second is not None:
            inside = f'"FOLDER", subfolder="{second.folder}", {half}'
            opened.append(f"{second.folder} = {second.class_name}.from_pretrained({inside})")
        if self._known.modular:
            opened += [f"pipe = {kind}.from_pretrained({place})", f"pipe.load_components({half})"]
            beside = "" if second is None else f", {second.folder}={second.folder}"
            opened += [f"pipe.update_components(transformer=network{beside})"] * own
        else:
            opened += [f"{name} = {_opened(one)}" for name, one in self._known.beside.items()]
            told, later = [f"{name}={name}" for name in self._known.beside], []
            if self._known.module == DIFFUSERS:
                told = ["transformer=network"] * own + told
            else:  # Diffusers takes no class that it does not know for one of the folder's
                told = ["trust_remote_code=True", *told]
                later = ["pipe.transformer = network"] * own
            opened += [f"pipe = {kind}.from_pretrained({', '.join([place, *told, half])})", *later]
        opened += self._all_adapted() * (self.adapters and not self.whole)
        places = {self._known.module: [kind]}
        if own:
            module = diffusers_form(self.config.model).module
            names = [self._network] + ([] if second is None else [second.class_name])
            places[module] = [*places.get(module, []), *names]
        made, tools = self._made(self._pipeline or kind)
        found = (f"from {place} import {', '.join(names)}" for place, names in places.items())
        imports = ["import torch", *found]
        imports += [f"from diffusers.utils import {', '.join(tools)}"] if tools else []
        kinds = sorted(one.kind for one in self._known.beside.values())
        imports += [f"from transformers import {', '.join(kinds)}"] if kinds else []
        return [*imports, "", *opened, 'pipe.to("cuda")', *made]

    def _made(self, kind: str) -> tuple[list[str], list[str]]:
        """(lines of code that call the pipeline `kind`, names to import from diffusers.utils)."""
        size, model = usual_size(self.card), self.config.model
        given = any(word in kind for word in _GIVEN)
        first = "prompt=" if given or self._known.modular else ""
        told = [f"{first}{_quoted(self.prompt)}"]
        told += ['image=load_image("first.png")'] * given
        told += [f"{name}={size[name]}" for name in ("height", "width") if name in size]
        if self.config.distill.method is not None and not self._known.modular:
            told += [f"num_inference_steps={self._steps}"]
            told += ["guidance_scale=1.0"] * (self.config.objective.guidance is None)
        tools = ["load_image"] * given
        if self._known.modular:
            told += ['output="images"']
            return [f'pipe({", ".join(told)})[0].save("picture.png")'], tools
        if "video" not in codec_named(family_of(model).vae(model)).media or "ToImage" in kind:
            return [f'pipe({", ".join(told)}).images[0].save("picture.png")'], tools
        told += [f"num_frames={size['num_frames']}"] if "num_frames" in size else []
        made = [f"clip = pipe({', '.join(told)}).frames[0]", 'export_to_video(clip, "clip.mp4")']
        return made, ["export_to_video", *tools]

    def _loop(self) -> str:
        edm = self.config.objective if self._scheduler == EDM_SCHEDULER else None
        frames, rows, columns = self._latent()
        start = f"torch.randn(1, {self.config.model.in_channels}, {frames}, {rows}, {columns})"
        padded, length = "", self.config.model.text_pad_to
        if isinstance(length, int):
            rest = f"(0, 0, 0, {length} - caption.shape[1])"
            padded = f"caption = torch.nn.functional.pad(caption, {rest})\n"
        return _LOOP.format(
            network=self._network,
            scheduler=self._scheduler,
            place=json.dumps(self.base if self.adapters else "FOLDER"),
            adapted=f"{self._adapted('network')}\n" if self.adapters else "",
            levels=str(_STEPS) if edm else self._levels(),
            data_card=DATA_CARD,
            prompt=_quoted(self.prompt),
            padded=padded,
            start=f"{edm.sigma_max:g} * {start}" if edm else start,
            state="scheduler.scale_model_input(x, t)" if edm else "x",
            call=indent(self._call or "", 8 * " "),
            scale=f" / {edm.sigma_data:g}" if edm else "",
        )

    def _latent(self) -> tuple[int, int, int]:
        """(frames, rows, columns) of the dataset's most frequent size, in latent cells."""
        size, latent = usual_size(self.card), self.card["latent"]
        stride, frames = latent["stride"], 1 + (size["num_frames"] - 1) // latent["temporal_stride"]
        return frames, size["height"] // stride, size["width"] // stride

    def _tokens(self) -> int:
        (frames, rows, columns), model = self._latent(), self.config.model
        return frames * rows * columns // (model.patch_temporal * model.patch_spatial**2)

    @property
    def _steps(self) -> int:
        c = self.config.distill
        return _STEPS if c.method is None else c.steps

    def _levels(self) -> str:
        """Arguments of `set_timesteps` that give the noise levels of the run's sampler."""
        flow: FlowConfig = self.config.objective
        steps, told = self._steps, [str(self._steps)]
        if flow.ends_at_one_step:
            told = [f"sigmas=torch.linspace(1, 1 / {steps}, {steps}).tolist()"]
        if flow.time_shift_type or flow.sampling_levels is SamplingLevels.EMPIRICAL:
            shift = FlowMatching(flow).sampling_shift((self._tokens(),), steps)
            mu = shift if flow.time_shift_type is TimeShift.LINEAR else shift.log()
            told += [f"mu={mu.item():g}"]
        return ", ".join(told)


def _opened(part: PartBeside) -> str:
    told = [json.dumps(part.model), *[_HALF] * part.has_weights]
    return f"{part.kind}.from_pretrained({', '.join(told)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
