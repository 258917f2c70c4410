"""`PackedBatch`: what the loader passes to the step, token streams of the same samples."""

# L text tokens, N samples in a pack, E text width; T packed tokens

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor

from dit.batch.methods import GuidanceInput, KeptTokens, Pairs, Parts, Route
from dit.batch.sample import TEXT
from dit.batch.token_stream import TokenStream

LATENTS = "latents"
"""Name, in `PackedBatch.streams`, of the main stream of every pack: the latents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch(TokenStream):
    """A pack: the main stream (latents), other token streams, and conditions of the same samples.

    Texts, vectors and streams of other modalities are mappings by name. All streams share the
    texts, vectors, frame rates, keys and captions.
    """

    # By input name; each text input of the family is present, even if no sample has rows in it.
    # [L, E], bfloat16 or float32: rows of the N samples laid end to end
    texts: Mapping[str, Tensor]
    text_offsets: Mapping[str, tuple[int, ...]]  # N + 1 offsets of the samples in L
    vectors: Mapping[str, Tensor] = field(default_factory=dict)  # [N, E], such as pooled text
    fps_N: Tensor  # float32, frames per second; NaN for an image or unknown
    keys: tuple[str, ...]  # of the N samples; empty strings where a sample has none
    captions: tuple[str, ...]  # of the N samples, or () where they are unknown; for people alone
    pack_id: int  # 63-bit identity that, with seed and step, decides all random draws
    # Tokens of other modalities of the same N samples, such as sound, with widths of their own
    others: Mapping[str, TokenStream] = field(default_factory=dict)

    @property
    def streams(self) -> Mapping[str, TokenStream]:
        """All streams by name, the main one first."""
        return {LATENTS: self, **self.others}

    @property
    def copies(self) -> int:
        """Number of consecutive samples that share their random draws (2 for pairs, else 1)."""
        return 2 if Pairs in self.methods else 1

    @property
    def is_routed(self) -> bool:
        """Whether some layers process only a part of the tokens (token routing)."""
        return Route in self.methods

    @property
    def samples_read(self) -> tuple[int, ...]:
        """Index in this pack of the first sample that came from each stored sample.

        A stored sample becomes two if it is a pair, or several if it is cut into parts.
        """
        parts = self.method(Parts)
        if parts is None:
            return tuple(range(0, self.num_samples, self.copies))
        return tuple(parts.of.index(n) for n in range(parts.of[-1] + 1))

    @property
    def guidance(self) -> float | None:
        """The guidance scale for the guidance embedding; None for networks without one."""
        told = self.method(GuidanceInput)
        return None if told is None else told.scale

    @property
    def text_LE(self) -> Tensor:  # noqa: N802  # names of tensors end in their axes
        """The main text of all samples [L, E], concatenated."""
        return self.texts[TEXT]

    @property
    def text_starts(self) -> tuple[int, ...]:
        """N + 1 offsets of the samples in `text_LE`, in tokens."""
        return self.text_offsets[TEXT]

    @property
    def text_rows(self) -> tuple[int, ...]:
        """Text tokens of each sample, over all text inputs."""
        totals = [0] * self.num_samples
        for starts in self.text_offsets.values():
            totals = [n + b - a for n, (a, b) in zip(totals, pairwise(starts), strict=True)]
        return tuple(totals)

    def partial(
        self, rows_T: Tensor, *, starts: tuple[int, ...], kept_tokens: tuple[int, ...]
    ) -> PackedBatch:
        """The pack with only the tokens at the indices `rows_T`, for layers that process a part.

        `starts` and `kept_tokens` are the offsets and the numbers of real tokens of the samples,
        over all context-parallel ranks; in each sample, real tokens come before padding. `share`
        stays as it is, and the Route is removed.
        """
        part = self.without(Route).with_tokens(rows_T)
        return replace(part, starts=starts).with_method(KeptTokens(counts=kept_tokens))

    def with_text(self, name: str, rows_LE: Tensor, starts: tuple[int, ...]) -> PackedBatch:
        """A copy of the pack in which the text input `name` is `rows_LE`, with offsets `starts`."""
        return replace(
            self,
            texts={**self.texts, name: rows_LE},
            text_offsets={**self.text_offsets, name: starts},
        )
