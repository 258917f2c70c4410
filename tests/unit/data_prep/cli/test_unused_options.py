"""What a run does not use or does not keep of what it was given is said."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.cli.parser import main
from dit.codecs.dataset_card import CodecError
from dit.codecs.dataset_encoder import unused_places
from dit.codecs.text import TEXT_ENCODERS, ByteTable, TextEncoder, text_encoder_of_card
from dit.codecs.text.families import WanText
from dit.codecs.vae import Pixel
from dit.sampling import cards
from dit.sampling.cards import decoder_of_card
from tests.media_files import image, video


def packed(tmp_path: Path, *options: str) -> Path:
    image(tmp_path / "in/a.png")
    out = tmp_path / "out"
    words = ("--image_dir", str(tmp_path / "in"), "--output_dir", str(out), "--split", "1,0,0")
    assert main(["image", *words, "--num_workers", "0", *options]) == 0
    return out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--vae_cache_folder", "x"),
            "--vae_cache_folder is not used: it means nothing to 'pixel' and 'words'",
        ),
        (("--tokenizer_cache_dir", "x"), "--tokenizer_cache_dir is not used"),
        (("--workload_type", "i2v"), "--workload_type is not used"),
        (("--tiling",), "--tiling is not used"),
        (("--train_fps", "5"), "--train_fps is not used: there are no videos"),
        (("--drop_short",), "--drop_short is not used: there are no videos"),
        (("--caption_column", "x"), "--caption_column is not used: there is no --hf_dataset"),
    ],
)
def test_an_option_that_nothing_reads_is_named(tmp_path: Path, capsys, options, said) -> None:
    packed(tmp_path, *options, "--plan")
    found = capsys.readouterr().out
    assert said in found and found.count("is not used") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--mode frames --train_fps 5", "--train_fps is not used: --mode frames takes single"),
        ("--mode frames --window all", "--window is not used: --mode frames takes single"),
        ("--frame_buckets 5 --target_frames 9", "--target_frames is not used: --frame_buckets"),
        ("--drop_short", "--drop_short is not used: there is no --target_frames"),
        ("--height 8 --width 8 --max_pixels 64", "--max_pixels is not used: --height and"),
        ("--height 8 --width 8 --max_pixels 64 --reference_size own", ""),
        ("--num_frames 5 --drop_short --train_fps 5 --window all", ""),
    ],
)
def test_an_option_that_another_leaves_without_effect_is_named(
    tmp_path: Path, capsys, options: str, said: str
) -> None:
    video(tmp_path / "in/a.mp4")
    words = ("--video_dir", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out"))
    assert main(["video", *words, "--pixel_block", "4", "--plan=quick", *options.split()]) == 0
    found = capsys.readouterr().out
    assert said in found and found.count("is not used") == bool(said)


def test_a_model_without_its_processor_is_an_error(tmp_path: Path, capsys) -> None:
    """As FastVideo's command is typed: pixels would be packed in the place of its latents."""
    image(tmp_path / "in/a.png")
    words = ["image", "--image_dir", tmp_path / "in", "--output_dir", tmp_path / "out"]
    assert main([*map(str, words), "--model_path", "some/model"]) == 1
    said = "--model_name some/model means nothing to --processor pixel"
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_options_that_are_read_are_not_named(tmp_path: Path, capsys) -> None:
    packed(tmp_path, "--pixel_block", "2", "--text_width", "8", "--max_sequence_length", "9")
    assert "not used" not in capsys.readouterr().out


def pixel_and_card() -> tuple[Pixel, dict[str, Any]]:
    pixel = Pixel.of(block=2, colours=3)
    latent = {"mean": pixel.whitening.mean, "std": pixel.whitening.std}
    card = {"format_version": 1, "processor": {"name": "pixel", **pixel.settings}}
    return pixel, card | {"latent": latent}


def test_generation_says_it_of_the_models_of_a_card(capsys) -> None:
    pixel, card = pixel_and_card()
    assert decoder_of_card(card, None, None) == pixel and not capsys.readouterr().err
    assert decoder_of_card(card, "some/model", None) == pixel
    said = capsys.readouterr().err
    assert (
        said == "--tokenizer_model is not used: 'pixel', which made the dataset, has no weights\n"
    )
    assert not unused_places(WanText, {"--t5_cache_dir": "x"})


def test_generation_decodes_on_the_gpu(monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Pixel, "on", lambda self, device: asked.append(device) or self)
    monkeypatch.setattr(cards, "device", lambda: torch.device("cuda", 1))
    pixel, card = pixel_and_card()
    assert decoder_of_card(card, None, None) == pixel and asked == ["cuda:1"]


def test_processors_are_listed_without_a_command(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--list_processors"])
    listed = capsys.readouterr().out.split()
    assert (
        end.value.code == 0
        and "pixel" in listed
        and {*TEXT_ENCODERS} <= {word.rstrip(",") for word in listed}
    )


@pytest.mark.parametrize("length", [1, 2, 7, 9])
def test_bytes_cuts_between_characters(length: int) -> None:
    caption = "œuf œuf œuf"  # 14 bytes
    encoder = ByteTable(width=16, max_length=length)
    whole = ByteTable(width=16).encode(caption)
    kept = {1: 1, 2: 1, 7: 6, 9: 9}[length]  # of characters of 2, 1, 1, 1, 2, 1 bytes and so on
    assert (encoder.encode(caption) == whole[:kept]).all() and len(encoder.encode(caption)) == kept
    assert encoder.is_cut(caption) and not ByteTable(width=16).is_cut(caption)
    assert ByteTable(width=16, max_length=15).encode(caption).shape == whole.shape
    assert not ByteTable(width=16, max_length=15).is_cut(caption)


@pytest.mark.slow
def test_a_long_caption_is_cut_and_counted(tmp_path: Path, read_samples, capsys) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("long " * 40_000)
    out = packed(tmp_path, "--plan")
    assert (
        "planned: 1 x caption cut to 1024 tokens (--max_sequence_length)" in capsys.readouterr().out
    )
    assert "captions of more than 1024 tokens" in (out / "plan.html").read_text()
    packed(tmp_path)
    assert "packed: 1 x caption cut to 1024 tokens" in capsys.readouterr().out
    (sample,) = read_samples(out).values()
    assert len(sample["text"]) == 1024 and len(sample["caption"]) > 100_000
    packed(tmp_path, "--overwrite", "--max_sequence_length", "300000")
    assert "caption cut" not in capsys.readouterr().out
    (sample,) = read_samples(out).values()
    assert len(sample["text"]) == 40_001  # a row for each word, and one for all


def test_a_card_keeps_another_limit_than_the_usual() -> None:
    for encoder in (ByteTable(width=16), ByteTable(width=16, max_length=99)):
        again: TextEncoder = text_encoder_of_card(
            {"format_version": 1, "text_encoder": encoder.settings}
        )
        assert again.max_length == encoder.max_length
    assert "max_length" not in ByteTable(width=16).settings  # folders of before go on


def test_a_limit_of_nothing(tmp_path: Path) -> None:
    image(tmp_path / "in/a.png")
    from argparse import Namespace

    for encoder in (ByteTable, WanText):
        args = Namespace(
            max_sequence_length=0,
            text_width=16,
            t5_cache_dir=None,
            tokenizer_cache_dir=None,
            model_name=None,
            precision="float32",
        )
        with pytest.raises(CodecError, match="--max_sequence_length 0 must be at least 1"):
            encoder.from_arguments(args)


def test_what_an_early_end_leaves_is_said_by_the_commands_that_leave_it(tmp_path, capsys):
    (tmp_path / "file").touch()
    for words, said in (
        (("digits", "--output_dir", tmp_path / "file/out"), True),
        (("inspect", tmp_path / "file/in"), False),
    ):
        assert main([str(word) for word in words]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ")
        assert line.endswith("; nothing was published; the same command goes on from here") is said


@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_dataset_that_is_there_is_not_said_to_be_missing(
    error: BaseException, code: int, tmp_path: Path, monkeypatch, capsys
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("data_prep.cli.commands.show_summary", fail)
    words = ["digits", "--num_samples", "20", "--split", "1,0,0", "--output_dir"]
    assert main([*words, str(tmp_path / "out")]) == code
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"the dataset in {tmp_path / 'out'} is whole"), said
