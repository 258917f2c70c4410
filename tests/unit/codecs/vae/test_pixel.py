"""The pixel codec loses nothing, and whitens with the statistics of its dataset."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_prep.media.images import to_video
from data_prep.sources.digits import LEVELS, Digits
from dit.codecs import vae
from dit.codecs.dataset_card import CodecError
from dit.codecs.normalization import STD_MIN, Moments, Whitening
from dit.codecs.vae import CODECS, Pixel
from dit.codecs.vae.pixel import Basis, cosines, frequencies

ALL_LEVELS = torch.arange(256, dtype=torch.uint8)


def fitted(codec: Pixel, videos) -> Pixel:
    """Whitened by the videos, as a packing run does it."""
    moments = Moments()
    for video in videos:
        moments.merge(codec.measure(video))
    return codec.fitted(moments)


def card_of(codec: Pixel) -> dict:
    return {
        "format_version": 1,
        "processor": {"name": codec.name, **codec.settings},
        "latent": {"mean": list(codec.whitening.mean), "std": list(codec.whitening.std)},
    }


@settings(max_examples=50, deadline=None)
@given(mean=st.floats(-1, 1), std=st.floats(STD_MIN, 1))
def test_every_8_bit_level_survives_half_precision(mean: float, std: float) -> None:
    whitening = Whitening(mean=(mean,) * 4, std=(std,) * 4)
    codec = Pixel(block=2, colours=1, whitening=whitening)
    levels_HW = ALL_LEVELS.view(16, 16)
    latent_CFHW = codec.encode((levels_HW.float() / 127.5 - 1)[None, None])
    assert latent_CFHW.dtype == torch.float16
    pixels_FHWC = codec.decode(latent_CFHW)
    assert pixels_FHWC.dtype == torch.uint8 and pixels_FHWC.shape == (1, 16, 16, 3)
    for colour in range(3):  # grey is repeated
        assert torch.equal(pixels_FHWC[0, :, :, colour], levels_HW)


@pytest.mark.parametrize("block", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize("basis", Basis)
def test_videos_come_back_exactly(block: int, colours: int, basis: Basis) -> None:
    rng = torch.Generator().manual_seed(block)
    video = torch.randint(0, 256, (colours, 3, 2 * block, 5 * block), generator=rng)
    codec = Pixel.of(block=block, colours=colours, basis=basis)
    codec = fitted(codec, [video / 127.5 - 1])
    latent = codec.encode(video / 127.5 - 1)
    assert latent.shape == (colours * block**2, 3, 2, 5) == (codec.channels, 3, 2, 5)
    expected_FHWC = video.permute(1, 2, 3, 0).expand(-1, -1, -1, 3)
    assert torch.equal(codec.decode(latent).long(), expected_FHWC)


@pytest.mark.parametrize("colours", [1, 3])
def test_all_levels_come_back_from_frequencies(colours: int) -> None:
    """Even cells of each level, steps between black and white, and stripes of single pixels."""
    levels = ALL_LEVELS.float() / 127.5 - 1
    even = levels.view(1, 1, 16, 16).expand(colours, 1, 16, 16)
    even = even.repeat_interleave(8, 2).repeat_interleave(8, 3)
    place = torch.arange(128)
    edges = torch.where(place // 5 % 2 == 0, 1.0, -1.0).expand(colours, 1, 128, 128)
    stripes = torch.where((place[:, None] + place) % 2 == 0, 1.0, -1.0).expand_as(edges)
    videos = [even, edges, stripes]
    codec = fitted(Pixel.of(block=8, colours=colours, basis=Basis.DCT), videos[:1])
    for video in videos:  # the scales are those of even cells: the floor of deviations holds
        found = codec.decode(codec.encode(video))
        expected = ((video + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0)
        assert torch.equal(found, expected.expand(-1, -1, -1, 3))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_cosines_are_those_of_the_fourier_transform(size: int) -> None:
    """A DCT-II is the Fourier transform of the signal and its mirror image."""
    signal = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    k = torch.arange(size)
    turned = torch.fft.fft(torch.cat([signal, signal.flip(0)]))[:size]
    turned = (turned * torch.exp(-1j * torch.pi * k / (2 * size))).real / (2 * size) ** 0.5
    turned[0] /= 2**0.5
    torch.testing.assert_close(cosines(size) @ signal, turned)


@pytest.mark.parametrize(("colours", "block"), [(1, 1), (1, 4), (3, 1), (3, 2), (3, 8)])
def test_frequencies_are_orthonormal(colours: int, block: int) -> None:
    matrix = frequencies(colours, block)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(colours * block**2))


def test_frequencies_are_ordered_colour_row_column() -> None:
    codec = Pixel.of(block=4, colours=3, basis=Basis.DCT)
    red_to_blue = torch.tensor([1.0, 0, -1]).view(3, 1, 1, 1)
    wave = cosines(4)[2].float()
    for along, channel in ((wave.view(1, 1, 4, 1), 16 + 8), (wave.view(1, 1, 1, 4), 16 + 2)):
        latent = codec.encode_raw((red_to_blue * along).expand(3, 1, 4, 4))
        assert latent.argmax() == channel
        assert latent.square().sum() == pytest.approx(latent[channel].square().item())


def test_frequencies_are_divided_by_the_root_of_their_deviation() -> None:
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(3, 1, 8, 8 * n, generator=rng).cumsum(3) / 9 for n in range(1, 9)]
    raw = Pixel.of(block=4, colours=3, basis=Basis.DCT)
    codec = fitted(raw, rows)
    latent = torch.cat([codec.encode(row).flatten(1) for row in rows], dim=1).double()
    assert latent.mean(1).abs().max() < 1e-3
    found = latent.std(1, correction=0)
    assert found.square().mean() == pytest.approx(1, abs=1e-3)
    before = torch.cat([raw.encode_raw(row).flatten(1) for row in rows], dim=1).double()
    ratio = found.square() / before.std(1, correction=0)
    torch.testing.assert_close(ratio / ratio.mean(), torch.ones_like(ratio), rtol=2e-3, atol=0)


def test_cards_without_a_basis_hold_pixels() -> None:
    for basis, kept in (
        (Basis.PIXELS, {"block": 2, "pixel_channels": 3}),
        (Basis.DCT, {"block": 2, "pixel_channels": 3, "basis": "dct"}),
    ):
        codec = Pixel.of(block=2, colours=3, basis=basis)
        assert codec.settings == kept and Pixel.from_settings(kept) == codec
        assert vae.codec_of_card(card_of(codec)) == codec


def test_channels_are_ordered_colour_row_column() -> None:
    video_CFHW = torch.arange(3 * 4 * 6, dtype=torch.float32).view(3, 1, 4, 6)
    latent = Pixel.of(block=2, colours=3).encode_raw(video_CFHW)
    for colour, row, column in itertools.product(range(3), range(2), range(2)):
        channel = colour * 4 + row * 2 + column
        assert torch.equal(latent[channel, 0], video_CFHW[colour, 0, row::2, column::2])


def test_the_17_levels_of_digits_come_back() -> None:
    source = Digits(num_samples=50)
    videos = [source.read(entry).video_CFHW for entry in source.entries]
    codec = fitted(Pixel.of(block=2, colours=1), videos)
    seen = set()
    for entry, video in zip(source.entries, videos, strict=True):
        index = int(entry.key.rpartition("-")[2])
        pixels_HW = codec.decode(codec.encode(video))[0, :, :, 0].double()
        levels_HW = (pixels_HW * LEVELS / 255).round().numpy()
        assert np.array_equal(levels_HW, source._images_NHW[index])
        seen |= set(levels_HW.ravel().tolist())
    assert seen == set(range(17))


def test_latents_of_the_dataset_are_whitened_per_channel() -> None:
    rng = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 0.02, 0.3]).view(3, 1, 1, 1)
    videos = [
        torch.randn(3, 1, 4, 4 + 2 * n, generator=rng) * scale + 10 * scale for n in range(20)
    ]
    codec = fitted(Pixel.of(block=2, colours=3), videos)
    latents = torch.cat([codec.encode(video).flatten(1) for video in videos], dim=1).double()
    assert latents.mean(1).abs().max() < 1e-3
    assert (latents.std(1, correction=0) - 1).abs().max() < 1e-3


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=10), seed=st.integers(0, 99))
def test_streamed_moments_equal_those_of_all_values_at_once(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunks = [1e6 + rng.standard_normal((2, length)) for length in lengths]  # sums of squares fail
    moments = Moments()
    for chunk in chunks:
        moments.add(torch.from_numpy(chunk).view(2, 1, 1, -1))
    whole = np.concatenate(chunks, axis=1)
    assert moments.count == whole.shape[1]
    np.testing.assert_allclose(moments.whitening().mean, whole.mean(1), rtol=1e-7)
    expected = whole.std(1).clip(STD_MIN)
    np.testing.assert_allclose(moments.whitening().std, expected, rtol=1e-6)


def test_a_constant_channel_whitens_to_zero_and_comes_back() -> None:
    video = torch.full((3, 1, 4, 4), 77 / 127.5 - 1)
    codec = fitted(Pixel.of(block=2, colours=3), [video])
    latent = codec.encode(video)
    assert latent.abs().max() < 1e-3
    assert (codec.decode(latent) == 77).all()


def test_decode_says_which_channels_it_wants() -> None:
    with pytest.raises(ValueError, match=r"'pixel' decodes latents \[4, F, H, W\].*\[3, 1, 2, 2\]"):
        Pixel.of(block=2, colours=1).decode(torch.zeros(3, 1, 2, 2))


def test_a_card_rebuilds_the_processor() -> None:
    codec = fitted(Pixel.of(block=2, colours=3), [torch.linspace(-1, 1, 48).view(3, 1, 4, 4)])
    assert vae.codec_of_card(card_of(codec)) == codec


def test_given_pictures_stand_in_grey_and_rgb_becomes_grey_as_in_packing() -> None:
    levels_HWC = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    coloured = torch.from_numpy(levels_HWC / 127.5 - 1).float().permute(2, 0, 1)
    grey = to_video(Image.fromarray(levels_HWC), colours=1)[:, 0]
    codec = fitted(Pixel.of(block=2, colours=1, image_conditioning=True), [grey[:, None]])
    assert vae.codec_of_card(card_of(codec)) == codec
    (from_grey,) = codec.image_inputs(grey[None], -grey[None], frames=5)
    video = torch.stack([grey, *[torch.zeros_like(grey)] * 3, -grey], dim=1)
    expected = codec.whitening.apply(codec.encode_raw(video))
    assert torch.equal(from_grey["condition_latent"], expected)
    assert torch.equal(from_grey["first_frame_latent"], expected[:, :1])
    (from_rgb,) = codec.image_inputs(coloured[None], None, frames=1)
    found = codec.decode(from_rgb["condition_latent"])[0, ..., 0].int()
    assert (found - ((grey[0] + 1) * 127.5).round().int()).abs().max() <= 1  # Pillow rounds down


def test_conditions_take_the_bytes_that_are_planned() -> None:
    video = torch.rand(1, 5, 4, 8)
    for conditioned in (False, True):
        codec = Pixel.of(block=2, colours=1, image_conditioning=conditioned)
        (parts,) = codec.encode_batch([video], keys=["a"])
        assert {part.dtype for part in parts.values()} == {torch.float16}
        extra = sum(part.nbytes for name, part in parts.items() if name != "latent")
        assert extra == codec.extra_bytes(frames=5, height=4, width=8)
        assert (extra > 0) == conditioned


def test_a_card_that_does_not_fit_is_an_error() -> None:
    good = card_of(Pixel.of(block=2, colours=1))
    for change, message in (
        ({"processor": {**good["processor"], "name": "pixle"}}, "no processor 'pixle'.*pixel"),
        ({"processor": {"name": "pixel", "pixel_channels": 1}}, "lacks 'block'"),
        ({"processor": {**good["processor"], "pixel_channels": 3}}, "4 means.*12 channels"),
        ({"latent": {"mean": [0.0] * 4}}, "lacks 'std'"),
        ({"format_version": 2}, "format_version 2"),
        ({"latent": None}, "no object 'latent'"),
    ):
        with pytest.raises(CodecError, match=message):
            vae.codec_of_card({**good, **change})


def test_every_registered_processor_is_named_as_it_is_listed() -> None:
    assert "pixel" in CODECS
    for name, codec in CODECS.items():
        assert codec.name == name
        assert set(codec.media) <= {"image", "video"} and codec.description


def test_grey_latents_are_made_of_coloured_pictures_too() -> None:
    grey_CFHW = torch.rand(1, 1, 8, 8) * 2 - 1
    codec = Pixel.of(block=2, colours=1)
    made = codec.encode_raw(grey_CFHW.expand(3, -1, -1, -1))
    torch.testing.assert_close(made, codec.encode_raw(grey_CFHW))
