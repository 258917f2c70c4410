"""The README.md of a folder that is exported, with what is known and nothing else.

code     Python that makes one picture with an export
facts    what a checkpoint and its run say: data, steps, settings, pictures
lora     of a folder of adapters
network  of a Diffusers folder with a whole network, or a pipeline
"""

from dit.convert.cards.code import DATA_CARD, HUB, PictureCode
from dit.convert.cards.facts import RunFacts, ShownPicture, write_card
from dit.convert.cards.lora import LoraCard
from dit.convert.cards.network import NetworkCard

__all__ = [
    "DATA_CARD",
    "HUB",
    "LoraCard",
    "NetworkCard",
    "PictureCode",
    "RunFacts",
    "ShownPicture",
    "write_card",
]
