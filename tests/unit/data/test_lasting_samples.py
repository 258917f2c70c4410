"""A sample that outlives the memory of its shard has tensors of its own, each of them."""

from __future__ import annotations

from dataclasses import fields

import torch

from dit.batch import LatentSample
from dit.data.energon.task_encoder import _lasting


def test_no_tensor_of_a_lasting_sample_shares_memory() -> None:
    latent = torch.ones(2, 1, 2, 2)
    sample = LatentSample(
        key="a",
        latent_CFHW=latent,
        text_LE=torch.ones(3, 4),
        fps=24.0,
        latent_logvar_CFHW=torch.ones(2, 1, 2, 2),
        loss_mask_1FHW=torch.ones(1, 1, 2, 2),
        others={"pooled_text": torch.ones(4)},
    )
    kept = _lasting(sample)
    stored = [getattr(sample, field.name) for field in fields(sample)]
    tensors = [one for one in stored if isinstance(one, torch.Tensor)]
    assert len(tensors) == len([f for f in fields(sample) if "Tensor" in str(f.type)]) - 1
    for tensor in (*tensors, *sample.others.values()):
        tensor.zero_()  # as the next sample does
    again = [getattr(kept, field.name) for field in fields(kept)]
    copies = [one for one in again if isinstance(one, torch.Tensor)]
    assert len(copies) == len(tensors)
    assert all(one.all() for one in (*copies, *kept.others.values()))
