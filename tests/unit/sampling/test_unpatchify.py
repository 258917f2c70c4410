import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.models.positions import unpack_latents

side = st.integers(1, 3)


def tokens_by_loops(latent_CFHW, pt: int, p: int):
    """Tokens (frame, row, column), features (c, t, h, w), one number at a time."""
    c_, f_, h_, w_ = latent_CFHW.shape
    return torch.tensor(
        [
            [
                latent_CFHW[c, f * pt + t, row * p + y, column * p + x]
                for c in range(c_)
                for t in range(pt)
                for y in range(p)
                for x in range(p)
            ]
            for f in range(f_ // pt)
            for row in range(h_ // p)
            for column in range(w_ // p)
        ]
    )


@settings(max_examples=20, deadline=None)
@given(
    grids=st.lists(st.tuples(side, side, side), min_size=1, max_size=3),
    channels=side,
    pt=st.integers(1, 2),
    p=st.integers(1, 2),
)
def test_unpacking_inverts_patching_for_any_grids(make_pack, grids, channels, pt, p) -> None:
    latents = [torch.randn(channels, f * pt, h * p, w * p) for f, h, w in grids]
    queue = [tokens_by_loops(latent, pt, p) for latent in latents]
    batch = make_pack(
        grids, width=channels * pt * p * p, multiple=4, latents=lambda n, c, rng: queue.pop(0)
    )
    found = unpack_latents(batch.latent_TC, batch, patch_temporal=pt, patch_spatial=p)
    assert len(found) == len(latents)
    assert all(torch.equal(a, b) for a, b in zip(found, latents, strict=True))
