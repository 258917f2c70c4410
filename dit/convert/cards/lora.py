"""The card of a folder of adapters."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from dit.convert.cards.code import HUB
from dit.convert.cards.facts import RunFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraCard:
    """What a person who finds the folder should know."""

    network: str  # class of Diffusers' network
    base: str | None = None  # name on the hub of the weights that the adapter is for
    base_digest: str | None = None
    code: str = ""  # that makes a picture with the base and the adapters
    run: RunFacts = field(default_factory=RunFacts)

    def text(self, *, comfyui: bool) -> str:
        """The page; `comfyui`: whether there is a file for ComfyUI."""
        parts = [self._front(), "# LoRA\n", self._facts(), "## Use\n", self._loading(comfyui)]
        parts += self.run.sections()
        return "\n".join(parts)

    def _front(self) -> str:
        base = ""
        if self.base is not None and HUB.fullmatch(self.base):
            base = f"base_model: {json.dumps(self.base)}\n"
        return f"---\nlibrary_name: diffusers\n{base}tags:\n- lora\n- peft\n---\n"

    def _facts(self) -> str:
        base = self.base or f"a `{self.network}`"
        digest = f" (SHA-256 of its weights: `{self.base_digest}`)" if self.base_digest else ""
        return "\n".join([f"- Base: {base}{digest}", *self.run.lines()]) + "\n"

    def _loading(self, comfyui: bool) -> str:
        lines = [
            f"```python\n{self.code}\n```\n",
            "`peft.PeftModel.from_pretrained(transformer, FOLDER)` reads the folder as well.",
        ]
        if comfyui:
            lines.append("For ComfyUI, copy `comfyui/lora.safetensors` into `models/loras`.")
        return "\n".join(lines) + "\n"
