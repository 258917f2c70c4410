"""Networks that other projects train and this one does not, and what each of them needs.

Errors about unknown names and docs/families.md say what stands here. A network that becomes a
family leaves the list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherNetwork:
    """A network without a family."""

    title: str
    patterns: tuple[str, ...]
    """Of its names (sizes, processors, classes of Diffusers) in small letters and digits."""
    lacks: str
    """The part that it needs and the tree does not have."""


_AUDIO = "a stream of audio tokens beside the video, with attention between the two, and its codec"
_SANDWICH = "norms before and after each part of a layer, gates through tanh and no shift"

OTHER_NETWORKS = (
    OtherNetwork(
        title="SDXL",
        patterns=("sdxl*", "stablediffusionxl*", "unet2d*"),
        lacks="a UNet, whose convolutions need rectangles and not packed tokens, and a"
        " discrete noise schedule",
    ),
    OtherNetwork(
        title="FLUX.2",
        patterns=("flux2*",),
        lacks="a modulation that all layers of a stack share, positions of four axes, Mistral's"
        " hidden states as text, and its autoencoder",
    ),
    OtherNetwork(
        title="Z-Image",
        patterns=("zimage*",),
        lacks=f"{_SANDWICH}, refiners of the image tokens, and learned padding tokens, which are"
        " attended to, up to multiples of 32 of image and text",
    ),
    OtherNetwork(title="LTX-2", patterns=("ltx2*",), lacks=_AUDIO),
    OtherNetwork(
        title="LTX-Video",
        patterns=("ltx", "ltxv*"),
        lacks="rotary tables over the whole width, so that each head has its own frequencies",
    ),
    OtherNetwork(
        title="Lumina 2",
        patterns=("lumina*",),
        lacks=f"grouped-query attention, {_SANDWICH}, and refiners of the image tokens",
    ),
    OtherNetwork(
        title="HiDream",
        patterns=("hidream*",),
        lacks="a mixture of experts as MLP, and for each layer the text states of another"
        " Llama layer",
    ),
    OtherNetwork(
        title="OmniGen2",
        patterns=("omnigen*",),
        lacks="a class in Diffusers 0.42 to compare its outputs with",
    ),
    OtherNetwork(
        title="AuraFlow",
        patterns=("auraflow*",),
        lacks="a learned position table that is cropped around its middle, and register tokens",
    ),
    OtherNetwork(
        title="ERNIE-Image",
        patterns=("ernieimage*",),
        lacks="one modulation for all layers, after norms with weights",
    ),
    OtherNetwork(
        title="Ideogram 4",
        patterns=("ideogram*",),
        lacks=f"{_SANDWICH}, and positions that are interleaved with those of the language model",
    ),
    OtherNetwork(
        title="Krea 2",
        patterns=("krea2*",),
        lacks="grouped-query attention with a gate on its output, and layers that fuse the states"
        " of several text layers",
    ),
    OtherNetwork(
        title="MiniMax H3",
        patterns=("minimax*",),
        lacks=f"{_AUDIO}, and a modulation for each modality",
    ),
    OtherNetwork(
        title="Anima",
        patterns=("anima*",),
        lacks="a class in Diffusers 0.42 to compare its outputs with",
    ),
    OtherNetwork(
        title="FastVideo's sparse attention",
        patterns=("vsa*", "vmoba*"),
        lacks="kernels of block-sparse attention over packs, and the weights of the gate of its"
        " compressed branch",
    ),
)


def why_not_trained(name: str) -> str | None:
    """A sentence for an error about an unknown name; None where it names nothing of the list."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for other in OTHER_NETWORKS:
        if any(fnmatchcase(plain, pattern) for pattern in other.patterns):
            return f"{other.title} is not trained here: it needs {other.lacks} (docs/families.md)"
    return None
