"""Where the text encoder computes in generation: on the GPU where it fits, else on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dit.codecs import pretrained
from dit.sampling.commands import generate_media
from dit.sampling.given_pictures import OF_COMMAND_LINE, GivenPictures


class Encoder:
    """Says where it computes each prompt."""

    most_pictures, sees_first_frame, name = 0, False, "stub"
    reads_alone = True

    def __init__(self, seen: list[str], place: str = "cpu", *, room: int):
        self.seen, self.place, self.room = seen, place, room

    def on(self, device: str) -> Encoder:
        return Encoder(self.seen, device, room=self.room)

    def encode_all(self, caption: str) -> dict[str, torch.Tensor]:
        assert (self.place != "cpu") == (self.place in pretrained._visitors)
        self.seen.append(self.place)
        if self.place != "cpu" and len(self.seen) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"text": torch.full((1, 2), float(len(caption)))}

    encode_negative = encode_all


@pytest.mark.parametrize(
    ("room", "others", "seen"),
    [
        (9, "", ["cuda:0"] * 2),
        (1, "", ["cuda:0"] * 2 + ["cpu"] * 2),
        (9, "no room there", ["cuda:0"] * 2 + ["cpu"] * 2),
    ],
    ids=["fits", "does not fit", "does not fit on another rank"],
)
def test_prompts_are_encoded_on_the_gpu_where_there_is_room(
    monkeypatch, capsys, room, others, seen
) -> None:
    found: list[str] = []
    opened: Any = SimpleNamespace(encoder=Encoder(found, room=room), null={})
    given = [GivenPictures(options=OF_COMMAND_LINE)] * 2
    words = [("a cat", ""), ("a horse", "")]
    monkeypatch.setattr(generate_media, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), [mine, others])
    )
    texts = generate_media._encoded(opened, words, given)
    assert found == seen and [text.prompt["text"][0, 0] for text in texts] == [5, 7]
    assert not pretrained._visitors and ("computes on the CPU" in capsys.readouterr().err) == (
        "cpu" in seen
    )
