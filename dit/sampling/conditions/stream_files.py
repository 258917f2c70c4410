"""Reads known frames or known sound of a sample from files, for networks with sound, as latents.

The options `--frames_of` and `--sound_of` of `generate_dit.py` name the files. The network
generates the sound for known frames, or the frames for known sound. A file that is shorter than the
sample gives its beginning.
"""

# F H W frames, rows and columns, of pixels or of a latent; C channels, S samples
# K channels, A frames of the latent of a sound

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dit.codecs.frame_pictures import first_film
from dit.codecs.sound import sound_codec_of_card
from dit.models.registry import has_sound
from dit.sampling.conditions.clips import check_video, read_clip
from dit.sampling.conditions.sound import SoundRequest, sound_frames
from dit.sampling.given_pictures import OF_COMMAND_LINE
from dit.sampling.latent_sizes import Size
from dit.system_errors import explained

if TYPE_CHECKING:
    from dit.sampling.open_checkpoint import OpenCheckpoint

FRAMES_OF, SOUND_OF = "--frames_of", "--sound_of"
_SECONDS = 0.01
"""Largest difference in seconds between a clip and its frames at --fps that gives no notice."""


class _Film(NamedTuple):
    """The start and the frame rate of a file's video stream."""

    begin: float  # time of the first frame on the clock of the file, in seconds
    fps: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFiles:
    """The files from which a sample takes known frames and known sound; None: none are known."""

    frames_of: str | None = None
    sound_of: str | None = None
    place: str = ""
    """Position of the prompt in its file, with which error messages begin."""

    @classmethod
    def of(cls, options: Any, place: str) -> StreamFiles:
        """The files that `options` of generation name in `frames_of` and `sound_of`.

        `place` is the position of the prompt in its file, for messages.
        """
        files = (options.frames_of, options.sound_of)
        frames_of, sound_of = (None if file is None else str(file) for file in files)
        return cls(frames_of=frames_of, sound_of=sound_of, place=f"{place}: " if place else "")

    def check(self, opened: OpenCheckpoint, *, frames: int) -> None:
        """Checks that the network and a sample of `frames` frames can take the files.

        Raises:
            ValueError: the network generates no sound, the sample is a single picture, or
                `frames_of` is not named like a video.
        """
        model = opened.config.model
        for file, option in ((self.frames_of, FRAMES_OF), (self.sound_of, SOUND_OF)):
            if file is None:
                continue
            where = f"{self.place}{option} {file}"
            if not has_sound(model):
                raise ValueError(
                    f"{where}: model.family={model.family} generates no sound, so it cannot use"
                    f" this file; leave {option} out"
                )
            if frames == 1:
                raise ValueError(
                    f"{where}: a picture has no sound; give --num_video_frames above 1"
                )
        if self.frames_of is not None:
            check_video(self.frames_of, option=f"{self.place}{FRAMES_OF}")

    def request(self, opened: OpenCheckpoint, *, size: Size, fps: float) -> SoundRequest | None:
        """The sound to generate for a sample, with the latents of known frames and known sound.

        `size` is (frames, rows, columns) in pixels, `fps` in frames per second. None for a sample
        without sound.

        Raises:
            ValueError: a file cannot be read, a codec is missing, or all frames and all sound are
                known.
        """
        model = opened.config.model
        count = sound_frames(model, frames=size[0], fps=fps)
        if not count:
            return None
        given_CFHW = None if self.frames_of is None else self._frames(opened, size)
        given_KA = None if self.sound_of is None else self._sound(opened, count, size[0] / fps)
        whole = opened.latent_stride.latent(size)[0]
        lengths = [0 if one is None else one.shape[1] for one in (given_CFHW, given_KA)]
        if lengths == [whole, count]:
            raise ValueError(
                f"{self.place}{FRAMES_OF} {self.frames_of} and {SOUND_OF} {self.sound_of} give all"
                " frames and all sound, so nothing is left to generate; leave one of the options"
                " out, or give a larger --num_video_frames"
            )
        return SoundRequest(frames=count, given_KA=given_KA, given_CFHW=given_CFHW)

    def _frames(self, opened: OpenCheckpoint, size: Size) -> Tensor:
        """The latent [C, F, H, W] of the frames that `_shown` reads.

        Raises:
            ValueError: the VAE is missing, or the file cannot be read or is shorter than a token.
        """
        decoder = opened.decoder
        if decoder is None:
            raise ValueError(
                f"{self.place}{FRAMES_OF} {self.frames_of}: the VAE of the data is not on this"
                f" machine; {OF_COMMAND_LINE.encoders} the folder that has it"
            )
        # `encode` rounds to the type of shards.
        pixels_F3HW = self._shown(opened, size)
        return decoder.whitening.apply(decoder.encode_raw(pixels_F3HW.transpose(0, 1)))

    def _shown(self, opened: OpenCheckpoint, size: Size) -> Tensor:
        """The file's frames [F, 3, H, W], scaled to `size` and cut to whole tokens.

        Raises:
            ValueError: the file cannot be read or is shorter than a token.
        """
        option, stride = f"{self.place}{FRAMES_OF}", opened.latent_stride
        assert self.frames_of is not None
        latent = stride.latent(size)
        frames, height, width = stride.pixels(latent)
        pixels_F3HW = read_clip(self.frames_of, (frames, height, width), option=option)
        cells = (len(pixels_F3HW) - 1) // stride.temporal_stride + 1
        cells = cells // stride.patch_temporal * stride.patch_temporal
        if not cells:
            least = stride.pixels((stride.patch_temporal, *latent[1:]))[0]
            raise ValueError(
                f"{option} {self.frames_of} is too short ({len(pixels_F3HW)} of the at least"
                f" {least} frames that the network needs); give a longer clip"
            )
        return pixels_F3HW[: (cells - 1) * stride.temporal_stride + 1]

    def _sound(self, opened: OpenCheckpoint, count: int, seconds: float) -> Tensor:
        """The latent [K, A] of the first `seconds` of the file's sound.

        It has `count` frames, or as many as the sound fills if the file is shorter.

        Raises:
            ValueError: the data have no sound codec, or the file cannot be read or is shorter than
                a frame.
        """
        from dit.codecs.sound.tracks import SoundTrack

        where, codec = f"{self.place}{SOUND_OF} {self.sound_of}", sound_codec_of_card(opened.card)
        if codec is None:
            raise ValueError(
                f"{where}: the dataset card in {opened.path} names no sound codec, so sound cannot"
                " be encoded; pack the data with --audio_processor, and train again"
            )
        assert self.sound_of is not None
        import torch

        try:
            form = {"rate": codec.rate, "channels": codec.sound_channels}
            track = SoundTrack.of(Path(self.sound_of), **form)
            span = track.read_span(_begin(self.sound_of), seconds)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{where} cannot be read as sound ({explained(error)}); give a WAV or a video with"
                " sound"
            ) from error
        samples_CS = torch.from_numpy(span.samples_CS)
        there = samples_CS.shape[1] - round(span.short * codec.rate)
        if there < samples_CS.shape[1]:  # otherwise silence after the file's end would be known
            count = codec.frames_of(there + 1) - 1
        if not count:
            raise ValueError(
                f"{where} is too short: the network reads at least one latent frame of sound; give"
                " a longer file"
            )
        return codec.encode(samples_CS)[:, :count]

    def notes(self, opened: OpenCheckpoint, *, size: Size, fps: float) -> list[str]:
        """Notices if the file of frames is shorter than the sample, or has another frame rate.

        `size` is (frames, rows, columns) of the sample in pixels, `fps` its frame rate.
        """
        found = []
        if self.frames_of is not None:
            film, frames = _film_of(self.frames_of), size[0]
            shown, where = len(self._shown(opened, size)), f"{FRAMES_OF} {self.frames_of}"
            if shown < frames:
                found.append(
                    f"{where} gives the first {shown} of {frames} frames; the rest is generated"
                )
            if film and film.fps and abs(frames / film.fps - frames / fps) > _SECONDS:
                found.append(
                    f"{where} has {film.fps:g} frames a second, and the sound is made for"
                    f" {fps:g}: give --fps {film.fps:g}"
                )
        return found


def _film_of(file: str) -> _Film | None:
    """The start and the frame rate of a file's video; None for a file without video."""
    import av

    with av.open(f"file:{file}") as container:
        film = first_film(container)
        if film is None:
            return None
        first = next(container.decode(film), None)
        rate = film.average_rate
        begin = 0.0 if first is None or first.time is None else first.time
        return _Film(begin, None if rate is None else float(rate))


def _begin(file: str) -> float:
    """The time in seconds, on the file's clock, at which reading of its sound begins.

    It is that of the first picture, or the start of the sound track if there is no video.
    """
    import av

    film = _film_of(file)
    if film is not None:
        return film.begin
    with av.open(f"file:{file}") as container:
        track = container.streams.audio[0]
        if track.start_time is None or track.time_base is None:
            return 0.0
        return float(track.start_time * track.time_base)
