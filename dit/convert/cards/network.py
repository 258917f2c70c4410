"""The card of an exported network."""

from __future__ import annotations

from dataclasses import dataclass, field

from dit.convert.cards.facts import RunFacts

_USE = """## What it may be used for

_To be filled in: what the licences of the data and of the weights that it started from permit._
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCard:
    """A Diffusers folder with the weights of a checkpoint."""

    network: str  # class of Diffusers' network
    weights: str  # which of the checkpoint's
    numbers: int  # of the network
    code: str  # that makes a picture with the folder
    run: RunFacts = field(default_factory=RunFacts)

    def text(self) -> str:
        facts = [
            f"- Network: `{self.network}`, {self.numbers:,} parameters",
            f"- Weights: {self.weights}",
            *self.run.lines(),
        ]
        return "\n".join(
            [
                "---\nlibrary_name: diffusers\n---\n",
                "# Diffusion transformer\n",
                "\n".join(facts) + "\n",
                _USE,
                "## Use\n",
                f"```python\n{self.code}\n```\n",
                *self.run.sections(),
            ]
        )
