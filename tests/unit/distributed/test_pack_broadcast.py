"""A rank that shares its replica with nobody; `tests/sharing.py` is for several."""

from __future__ import annotations

import pytest
import torch

from dit.distributed.pack_broadcast import Replica

CPU = torch.device("cpu")


def test_a_rank_alone_reads_ahead_in_another_thread(groups, make_pack):
    replica = Replica(groups)
    assert replica.alone and replica.reads
    packs = [make_pack(pack_id=number) for number in (3, 4, 5)]

    def read():
        yield from packs[1:]
        raise OSError("the disk is gone")

    assert [pack.pack_id for pack in replica.broadcast(packs[:1], CPU)] == [3]
    replica.start(read())
    with pytest.raises(OSError, match="disk is gone"):
        replica.wait(CPU)
    replica.pending = None
    replica.start(iter(packs[1:]))
    found = replica.wait(CPU)
    assert [pack.pack_id for pack in found] == [4, 5]
    assert torch.equal(found[0].text_LE, packs[1].text_LE)
    assert replica.pending is None
