"""The cases of all families that Diffusers has."""

from __future__ import annotations

from tests.families import (
    anima,
    chroma,
    dit,
    flux,
    flux2,
    hidream,
    hunyuan_image,
    hunyuan_video,
    hunyuan_video_15,
    longcat,
    ltx,
    lumina2,
    omnigen2,
    qwen_image,
    sd3,
    wan,
    zimage,
)
from tests.families.case import Case, Generation

CASES: dict[str, Case] = {
    "dit": dit.CASE,
    "wan": wan.CASE,
    "flux": flux.CASE,
    "qwen_image": qwen_image.CASE,
    "hunyuan_video": hunyuan_video.CASE,
    "hunyuan_video_15": hunyuan_video_15.CASE,
    "sd3": sd3.CASE,
    "hunyuan_image": hunyuan_image.CASE,
    "chroma": chroma.CASE,
    "ltx": ltx.CASE,
    "flux2": flux2.CASE,
    "lumina2": lumina2.CASE,
    "longcat": longcat.CASE,
    "zimage": zimage.CASE,
    "omnigen2": omnigen2.CASE,
    "hidream": hidream.CASE,
}
"""`model.family` -> its case."""
GENERATIONS: dict[str, Generation] = {
    **anima.GENERATIONS,
    **chroma.GENERATIONS,
    **flux.GENERATIONS,
    **flux2.GENERATIONS,
    **hidream.GENERATIONS,
    **hunyuan_image.GENERATIONS,
    **hunyuan_video.GENERATIONS,
    **hunyuan_video_15.GENERATIONS,
    **ltx.GENERATIONS,
    **longcat.GENERATIONS,
    **lumina2.GENERATIONS,
    **qwen_image.GENERATIONS,
    **sd3.GENERATIONS,
    **wan.GENERATIONS,
    **zimage.GENERATIONS,
}
"""Pipelines that make pictures and videos of texts."""
