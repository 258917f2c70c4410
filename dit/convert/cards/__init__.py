"""The README.md of a folder that is exported, with what is known and nothing else.

code     Python that makes one picture with an export
facts    what a checkpoint and its run say; the cards of adapters, and of a network or a pipeline
"""

from dit.convert.cards.code import DATA_CARD, HUB, PictureCode
from dit.convert.cards.facts import LoraCard, NetworkCard, RunFacts, ShownPicture, write_card
