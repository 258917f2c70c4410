"""Generates pictures and videos from prompts and an open checkpoint."""

# C latent channels; F H W 3 frames, rows, columns, colours of one picture

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import NullInputs
from dit.codecs.pretrained import visits
from dit.codecs.rgb import on_white
from dit.codecs.sound import sound_codec_of_card
from dit.codecs.text.encoder import TextEncoder, unknown_words
from dit.codecs.vae import usual_size
from dit.command_line import option_names
from dit.config import ObjectiveName, RunConfig, Sampler
from dit.distributed.entry import say_notice
from dit.distributed.process_groups import device
from dit.models.registry import family_of
from dit.parsing import cause
from dit.progress import Track, no_progress
from dit.sampling.commands.options import FPS, GenerationOptions
from dit.sampling.commands.stages import Stages
from dit.sampling.conditions.clips import check_video, is_video, shorter
from dit.sampling.conditions.files import ConditionFile, condition_files
from dit.sampling.conditions.stream_files import StreamFiles
from dit.sampling.conditions.stream_scales import StreamGuidance
from dit.sampling.conditions.tokens import Condition
from dit.sampling.experts import GuidedPair
from dit.sampling.generate import Request, SamplingSettings, Watch
from dit.sampling.given_pictures import OF_COMMAND_LINE, GivenPictures, PromptTexts
from dit.sampling.guiders import open_guider, open_guiders
from dit.sampling.latent_sizes import Size, cut, rounding
from dit.sampling.media_files import Picture, false_colours, waveform_of
from dit.sampling.open_checkpoint import OpenCheckpoint
from dit.sampling.prompts import Prompt, unguided, unused


def generate_opened(
    opened: OpenCheckpoint,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    options: GenerationOptions,
    latents: bool = False,
    track: Track = no_progress,
    watch: Watch | None = None,
) -> list[Picture]:
    """Generates a picture or video for each of `prompts`, in their order.

    Sample i starts from the noise of the seed `seed` + i. With `latents` each picture also keeps
    its latent. With several processes, each data-parallel replica generates some of the samples;
    the first process returns all pictures, the others an empty list. `track` shows the progress of
    the first process; `watch` is as in `generate_streams`.
    """
    asked, options = options, options_of_network(options, opened)
    stages = Stages.of(options, opened)
    whole = opened.with_stride(stages.stride)
    each = [options_of_prompt(options, prompt, whole) for prompt in prompts]
    shown_at = [_conditions_of(one, opened) for one in each]
    given = _pictures_of(prompts, each, opened)
    files = _stream_files(prompts, each, opened)
    words = [(p.text, one.negative_prompt) for p, one in zip(prompts, each, strict=True)]
    texts = _encoded(opened, words, given)
    groups = opened.model.groups
    mine = range(groups.dp.rank(), len(prompts), groups.dp.size())

    def request(i: int, size: Size) -> Request:
        return Request(
            inputs={**texts[i].prompt, **_picture_inputs(opened, given[i], size=size)},
            negative=texts[i].negative,
            latent_FHW=opened.latent_stride.latent(size),
            fps=math.nan if each[i].num_video_frames == 1 else each[i].fps or FPS,
            seed=seed + i,
            conditions=_conditions(opened, shown_at[i], size=size),
            sound=files[i].request(opened, size=size, fps=each[i].fps or FPS),
        )

    settings = _sampling_settings(options, scale=asked.guidance)
    told = replace(opened.config.objective, guidance=options.distilled_guidance)
    track = track if dist.get_rank() == 0 else no_progress
    sizes, config = {i: _size(each[i]) for i in mine}, replace(opened.config, objective=told)
    how: Any = {"config": config, "settings": settings, "track": track, "watch": watch}
    made = stages.generate(opened.model, sizes, request, **how)
    shown: list[Picture] = []
    if groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0:  # the first of the replica
        with track("decoding", len(made), 0) as advance:
            for i, (latent, sound_KA) in zip(mine, made, strict=True):
                one = _picture(opened, prompts[i], each[i], seed + i, latent, keep=latents)
                if sound_KA is not None:
                    one = _with_sound(one, sound_KA, opened, fps=each[i].fps or FPS, keep=latents)
                shown.append(replace(one, given_HW3=given[i].shown(*_size(each[i])[1:])))
                advance(1)
    shares: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(shown, shares)
    return sorted((p for share in shares or () for p in share), key=lambda picture: picture.seed)


def _encoded(
    opened: OpenCheckpoint, words: Sequence[tuple[str, str]], given: Sequence[GivenPictures]
) -> list[PromptTexts]:
    """The text encoder's tensors for each (prompt, negative prompt) in `words`.

    `given` has the pictures of each prompt. The encoder runs on the GPU if it fits there beside the
    network, else on the CPU; afterwards it is in host memory. Ranks that share a layer all use the
    same device.

    Raises:
        ValueError: the encoder reads the first frame or the pictures to edit, and a prompt has
            none.
    """
    where, encoder, why, texts = device(), opened.encoder, "", list[PromptTexts]()
    if where.type == "cuda":
        try:
            with visits(str(where)):
                texts = _texts(encoder.on(str(where)), opened.null, words, given)
        except torch.OutOfMemoryError as error:
            why = cause(error)
        whys = [why] * dist.get_world_size()
        dist.all_gather_object(whys, why)
        why = next(filter(None, whys), "")
        if not why:
            return texts
        torch.cuda.empty_cache()
        say_notice(
            f"the text encoder computes on the CPU, because it does not fit on the GPU ({why})"
        )
    return _texts(encoder, opened.null, words, given)


def _texts(
    encoder: TextEncoder,
    null: NullInputs,
    words: Sequence[tuple[str, str]],
    given: Sequence[GivenPictures],
) -> list[PromptTexts]:
    @cache
    def alone(text: str, negative: bool) -> Mapping[str, Tensor]:
        if not text:
            return dict(null)
        return encoder.encode_negative(text) if negative else encoder.encode_all(text)

    @cache
    def encoded(pair: tuple[str, str], pictures: GivenPictures) -> PromptTexts:
        return pictures.texts(encoder, pair, alone=alone)

    return [encoded(*each) for each in zip(words, given, strict=True)]


def _pictures_of(
    prompts: Sequence[Prompt], each: Sequence[GenerationOptions], opened: OpenCheckpoint
) -> list[GivenPictures]:
    """First and last frame, and pictures to edit, for each of `prompts`; `each` are its options.

    Raises:
        ValueError: the network takes no such pictures, or lacks one that it needs.
    """
    taken = family_of(opened.config.model).inputs(opened.config.model)
    given = [
        GivenPictures(
            first=None if condition_files(one) else next(iter(one.image), None),
            last=one.last_image,
            references=(*one.reference, *one.reference_video),
            reference_size=one.reference_size,
            options=OF_COMMAND_LINE.of(prompt),
        )
        for one, prompt in zip(each, prompts, strict=True)
    ]
    for pictures, one in zip(given, each, strict=True):
        pictures.check(taken, frames=_size(one)[0])
    return given


def _stream_files(
    prompts: Sequence[Prompt], each: Sequence[GenerationOptions], opened: OpenCheckpoint
) -> list[StreamFiles]:
    """The files that give the frames or the sound of a sample, for each prompt.

    Raises:
        ValueError: a file is given, but the network generates no sound or the sample is a picture.
    """
    pairs = zip(each, prompts, strict=True)
    files = [StreamFiles.of(one, prompt.place) for one, prompt in pairs]
    for one, options in zip(files, each, strict=True):
        one.check(opened, frames=_size(options)[0])
    return files


def _conditions_of(options: GenerationOptions, opened: OpenCheckpoint) -> tuple[ConditionFile, ...]:
    """The pictures and clips in `options` that are shown at certain frames of a video.

    Raises:
        ValueError: the network takes no such pictures, or one of their options is wrong.
    """
    found, model = condition_files(options), opened.config.model
    for one in found:
        one.check(_size(options)[0])
    if found and family_of(model).conditions(model) is None:
        raise ValueError(
            f"{found[0].option} {found[0].file}: the network shows no pictures or clips at chosen"
            " frames (LTX-Video from 0.9.5 on does); leave out --video, --at_frame, --strength and"
            " --condition_noise"
        )
    return found


def _conditions(
    opened: OpenCheckpoint, files: Sequence[ConditionFile], *, size: Size
) -> tuple[Condition, ...]:
    rules = family_of(opened.config.model).conditions(opened.config.model)
    size = opened.latent_stride.pixels(opened.latent_stride.latent(size))
    return tuple(one.latent(opened.decoder, rules, size) for one in files if rules)


def _sampling_settings(options: GenerationOptions, *, scale: float | None) -> SamplingSettings:
    """The settings of sampler and guidance in `options`.

    `scale` replaces the guidance scale of --guider's guiders; None keeps it.
    """
    assert options.guidance is not None and options.reference_guidance is not None
    assert options.num_steps is not None and options.sampler is not None
    return SamplingSettings(
        num_steps=options.num_steps,
        guidance=options.guidance,
        guidance_interval=options.guidance_interval,
        guidance_rescale=options.guidance_rescale,
        reference_guidance=options.reference_guidance,
        guidance_steps=options.guidance_steps,
        guidance_after=options.guidance_after,
        guidance_least_norm=options.guidance_least_norm,
        sampler=Sampler(options.sampler),
        condition_noise=options.condition_noise,
        guiders=open_guiders(options.guider, scale=scale) if options.guider else None,
        of_streams=StreamGuidance(
            **{name: getattr(options, name) for name in option_names(StreamGuidance)}
        ),
    )


def _picture_inputs(
    opened: OpenCheckpoint, given: GivenPictures, *, size: Size
) -> dict[str, Tensor]:
    stride, model = opened.latent_stride, opened.config.model
    size, wanted = stride.pixels(stride.latent(size)), family_of(model).inputs(model)
    multiple = stride.stride * model.side_cells
    return given.inputs(opened.decoder, wanted, size=size, multiple=multiple)


def _size(options: GenerationOptions) -> Size:
    frames, height, width = options.num_video_frames, options.height, options.width
    assert frames and height and width
    return frames, height, width


def _picture(
    opened: OpenCheckpoint,
    prompt: Prompt,
    options: GenerationOptions,
    seed: int,
    latent_CFHW: Tensor,
    *,
    keep: bool,
) -> Picture:
    if opened.decoder is None:
        frames = false_colours(latent_CFHW)
    else:
        frames = cut(opened.decoder.decode(latent_CFHW.cpu(), alpha=True).numpy(), _size(options))
    return Picture(
        frames_FHW3=on_white(frames),
        clear_FHW4=frames if frames.shape[-1] == 4 else None,
        prompt=prompt.text,
        seed=seed,
        settings=asdict(options)
        | {"precision": str(opened.config.model.precision), "checkpoint": str(opened.path)}
        | ({"lora": list(opened.lora)} if opened.lora else {}),
        latent_CFHW=latent_CFHW.cpu() if keep else None,
    )


def _with_sound(
    picture: Picture, sound_KA: Tensor, opened: OpenCheckpoint, *, fps: float, keep: bool
) -> Picture:
    """`picture` with its sound, which is decoded by the sound codec of the dataset card.

    The sound is as long as the video at `fps` frames per second; it is None if the card has no
    sound codec. With `keep` the picture also keeps the latent of the sound.
    """
    codec = sound_codec_of_card(opened.card)
    latent_KA = sound_KA.cpu()
    return replace(
        picture,
        sound=None
        if codec is None
        else waveform_of(latent_KA, codec, len(picture.frames_FHW3) / fps),
        sound_latent_KA=latent_KA if keep else None,
    )


def options_of_network(options: GenerationOptions, opened: OpenCheckpoint) -> GenerationOptions:
    """`options`, with steps, sampler and guidance scales that are None taken from the run.

    With --guider, `guidance` is that of the guider instead, and `reference_guidance` is 1.

    Raises:
        ValueError: a scale is given for which the network has no input, or which has no effect.
    """
    trained, given = opened.config.objective.guidance, options.distilled_guidance
    if trained is None and given is not None:
        raise ValueError(
            f"--distilled_guidance {given}: the network of {opened.path} takes no guidance scale;"
            " leave it out, and use --guidance"
        )
    model, least = opened.config.model, options.guidance_least_norm
    options.check_guidance(model)
    if options.sigmas and opened.config.objective.name != ObjectiveName.FLOW:
        raise ValueError(
            f"--sigmas: the network of {opened.path} was not trained by flow matching; leave them"
            " out, and use --num_steps"
        )
    if least and family_of(model).objective.keeps_norm(model) is None:
        raise ValueError(
            f"--guidance_least_norm {least}: guidance of model.family={model.family} does not"
            " restore norms; leave it out"
        )
    usual, scale = opened.config.usual_sampling, options.reference_guidance
    guidance = usual.guidance if options.guidance is None else options.guidance
    unused = family_of(model).unguided_by_references(model)
    if scale not in (None, 1) and unused:
        raise ValueError(f"--reference_guidance {scale}: {unused}; leave it out")
    if scale is None:
        scale = 1.0 if options.guider else opened.config.validation.reference_guidance
    if options.guidance is None and options.guider is not None:
        guidance = open_guider(options.guider).guidance_scale
    if options.reference_guidance not in (None, 1) and guidance == 1:
        raise ValueError(
            f"--reference_guidance {scale} has no effect without guidance (guidance is 1); give"
            " --guidance above 1, or leave --reference_guidance out"
        )
    return replace(
        options,
        num_steps=len(options.sigmas) or options.num_steps or usual.steps,
        sampler=options.sampler or str(usual.sampler),
        guidance=guidance,
        reference_guidance=scale,
        distilled_guidance=trained if given is None else given,
    )


def options_of_prompt(
    options: GenerationOptions, prompt: Prompt, opened: OpenCheckpoint
) -> GenerationOptions:
    """The options for one prompt, with its size, its pictures and its negative prompt.

    What the prompt does not state is taken from `options`. A size that neither states is the most
    frequent one in the dataset.

    Raises:
        ValueError: the size is not given and the dataset card lists none; or the network does not
            accept the size or a negative prompt.
    """
    found = prompt.size(options, usual_size(opened.card))
    missing = [f"--{name}" for name, value in found.items() if value is None]
    if missing:
        raise ValueError(
            f"give {', '.join(missing)}: the dataset card in {opened.path} lists no sizes"
        )
    negative = options.negative_prompt if prompt.negative is None else prompt.negative
    if negative and isinstance(opened.model, GuidedPair):
        raise ValueError(
            f"negative prompt {negative!r}: the network of --checkpoint_path_away sees no text;"
            " leave out the negative prompt or --checkpoint_path_away"
        )
    pictures: dict[str, Any] = {"last_image": prompt.last_image or options.last_image}
    pictures["image"] = options.image if prompt.image is None else (prompt.image,)
    for file in options.reference_video:
        check_video(str(file), option="--reference_video")
    if prompt.references:
        pictures |= {"reference": prompt.references, "reference_video": ()}
    for name in ("frames_of", "sound_of"):
        pictures[name] = getattr(prompt, name) or getattr(options, name)
    found |= {"fps": options.fps or FPS, "negative_prompt": negative}
    sized = replace(options, **found, **pictures)
    latent, most = opened.latent_stride.latent(_size(sized)), opened.config.model.largest_latent
    if most and any(side > end for side, end in zip(latent, most, strict=True)):
        frames, height, width = opened.latent_stride.pixels(most)
        raise ValueError(
            f"--num_video_frames {sized.num_video_frames} --height {sized.height} --width"
            f" {sized.width} is larger than the network takes (a latent of {latent}, beyond"
            f" {most}); give at most --num_video_frames {frames} --height {height} --width {width}"
        )
    return sized


def _other_than_distilled(config: RunConfig, options: GenerationOptions) -> str | None:
    warning = config.unlike_student(options.num_steps, options.sampler, options.guidance)
    learned = f"--num_steps {config.distill.steps} --sampler {config.distill.sampler}"
    return warning and f"{warning}; use {learned} --guidance 1"


def notes_on(
    opened: OpenCheckpoint, options: GenerationOptions, prompts: Sequence[Prompt]
) -> list[str]:
    """Notes for the user on unknown words and unused options of `prompts`, and on changed sizes."""
    options = options_of_network(options, opened)
    stride = Stages.of(options, opened).stride
    opened = opened.with_stride(stride)
    each = [options_of_prompt(options, prompt, opened) for prompt in prompts]
    sizes, negatives = [*map(_size, each)], (one.negative_prompt for one in each)
    words = unknown_words((one.text for one in prompts), opened.encoder, opened.card)
    scales = {"guidance": options.guidance or 0.0, "audio_guidance": options.audio_guidance}
    notes = [words, unused(prompts), unguided(negatives, **scales)]
    notes.append(_other_than_distilled(opened.config, options))
    notes += [rounding(s, stride.pixels(stride.latent(s))) for s in sizes]
    for one, prompt, size in zip(each, prompts, sizes, strict=True):
        files = StreamFiles.of(one, prompt.place)
        notes += files.notes(opened, size=size, fps=one.fps or FPS)
        frames = stride.pixels(stride.latent(size))[0]
        many = {"stride": stride.temporal_stride, "option": "--reference_video"}
        videos = filter(is_video, map(str, (*one.reference, *one.reference_video)))
        notes += [shorter(file, frames, **many) for file in videos]
    return list(dict.fromkeys(filter(None, notes)))
