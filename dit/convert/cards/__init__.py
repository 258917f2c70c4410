"""The README.md (card) of an exported folder, which states only known facts.

code     Python code that makes one picture with an export
facts    facts about a checkpoint and its run; the cards of adapters, and of a network or pipeline
"""

from dit.convert.cards.code import DATA_CARD, HUB, PictureCode
from dit.convert.cards.facts import LoraCard, NetworkCard, RunFacts, ShownPicture, write_card
