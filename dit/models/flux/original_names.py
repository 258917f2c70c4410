"""Names of linears in FLUX's own code -> those of Diffusers; files of kohya's scripts have them.

The linear of the last norm is left out: its scale and shift have changed places.
"""

from __future__ import annotations

from dit.models.double_single_form import ORIGINAL_NAMES

FLUX_NAMES: dict[str, str] = ORIGINAL_NAMES | {
    "double_blocks.*.img_mod.lin": "transformer_blocks.*.norm1.linear",
    "double_blocks.*.txt_mod.lin": "transformer_blocks.*.norm1_context.linear",
    "single_blocks.*.modulation.lin": "single_transformer_blocks.*.norm.linear",
}
