"""Choices of the size at which a reference picture is encoded, in packing and in generation."""

from __future__ import annotations

from enum import StrEnum


class ReferenceFit(StrEnum):
    """Size at which a reference picture is encoded."""

    OWN = "own"  # its own in whole patches, in packing within the pixel budget of the media
    TARGET = "target"  # that of its target; in packing scaled to cover it and cropped
    PUBLISHED = "published"  # what the pipeline of the published weights scales it to
