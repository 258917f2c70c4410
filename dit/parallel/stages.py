"""What pipeline stages send each other."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from torch import Tensor


class StageLink(P2PCommunicator):
    """Megatron-Core's link between stages, where packs differ in length and stages are two.

    Each of two stages is both the next and the previous one of the other. Megatron-Core then takes
    the shape of a gradient for that of hidden states, and the other way round: it sends the one for
    the previous stage first and expects the one of the previous stage first. Its exchange of the
    tensors themselves has an order for that (`batch_p2p_comm=False`), which serves shapes as well.
    """

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        def shape(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.tensor(tensor.shape, **options)

        options: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": torch.int64}
        previous, following = (
            torch.empty(3, **options) if wanted else None for wanted in (recv_prev, recv_next)
        )
        requests = _p2p_ops(
            tensor_send_prev=shape(tensor_send_prev),
            tensor_recv_prev=previous,
            tensor_send_next=shape(tensor_send_next),
            tensor_recv_next=following,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,  # type: ignore[arg-type]
            next_pipeline_rank=self.next_rank,  # type: ignore[arg-type]
        )
        for request in requests.values():
            request.wait()
        return tuple([0, 0, 0] if s is None else s.tolist() for s in (previous, following))  # type: ignore[return-value]
