"""torchvision's part in Diffusers' forward pass, where there is no torchvision."""

import pytest
from diffusers.models.transformers import transformer_cosmos

from tests.families.dit import NearestResize


@pytest.fixture
def resize(monkeypatch):
    monkeypatch.setattr(transformer_cosmos, "transforms", NearestResize, raising=False)
