"""Stand-ins for processors of pictures and text whose picture half needs torchvision."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchFeature, PreTrainedTokenizerFast

IMAGE_TOKEN = 100


class StandInProcessor:
    """What Qwen2VLProcessor does, whose picture half needs torchvision.

    Each `<|image_pad|>` of a text becomes as many image tokens as its picture has merged patches.
    """

    side, merge = 4, 2
    pixels = 256
    """Of a picture, along a side, for an image token."""

    def __init__(self, letters: PreTrainedTokenizerFast):
        self.letters = letters

    def __call__(self, *, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        assert padding and return_tensors == "pt" and len(text) == 1
        pictures = images if isinstance(images, list) else [images]
        pixels, grids = zip(*map(self.patches, pictures), strict=True)
        words, *rest = text[0].split("<|image_pad|>")
        assert len(rest) == len(pictures)
        ids = self.letters(words, add_special_tokens=False).input_ids
        for grid, after in zip(grids, rest, strict=True):
            ids += [IMAGE_TOKEN] * (grid[1] * grid[2] // self.merge**2)
            ids += self.letters(after, add_special_tokens=False).input_ids
        tensors = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)).long(),
        }
        tensors |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
        return BatchFeature(tensors)

    def patches(self, picture: Any) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """A mean of the picture's colours in each patch, and its grid; small, to save time."""
        sides = (picture.height, picture.width)
        rows, columns = (2 * max(1, side // self.pixels) for side in sides)
        small = picture.resize((columns * self.side, rows * self.side))
        levels_HWC = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).float() / 255
        cells = levels_HWC.view(rows, self.side, columns, self.side, 3).permute(0, 2, 4, 1, 3)
        flat = cells.reshape(rows * columns, 3, 1, -1).expand(-1, -1, 2, -1)
        return flat.reshape(rows * columns, -1), (1, rows, columns)


class StandInChatProcessor(StandInProcessor):
    """What Qwen3VLProcessor does: several texts padded on the left, with pictures or without."""

    pixels = 32

    def __init__(self, letters: PreTrainedTokenizerFast):
        super().__init__(letters)
        self.tokenizer = letters

    def __call__(self, *, text: list[str], padding_side: str, **given: Any) -> Any:
        assert padding_side == "left"
        if "images" not in given:
            return self.letters(text, padding_side=padding_side, **given)
        made = super().__call__(text=text, **given)
        made["mm_token_type_ids"] = (made["input_ids"] == IMAGE_TOKEN).long()
        return made

    def apply_chat_template(self, chat: Any, **given: Any) -> list[Any]:
        return [self.letters.apply_chat_template(chat, **given)]


class StandInPictures:
    """The picture half of the processor that LongCat-Image-Edit's pipeline calls."""

    merge_size = StandInProcessor.merge

    def __init__(self, letters: PreTrainedTokenizerFast):
        self.image_processor, self.processor = self, StandInProcessor(letters)

    def __call__(self, *, images: Any, return_tensors: str) -> Any:
        assert return_tensors == "pt"
        pixels, grid = self.processor.patches(images)
        return BatchFeature({"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])})
