"""The README.md of a folder that is exported, with what is known and nothing else.

facts    what a checkpoint and its run say: data, steps, settings, pictures
lora     of a folder of adapters
network  of a Diffusers folder with a whole network, or a pipeline
"""

from dit.convert.cards.facts import RunFacts, write_card
from dit.convert.cards.lora import LoraCard
from dit.convert.cards.network import NetworkCard

__all__ = ["LoraCard", "NetworkCard", "RunFacts", "write_card"]
