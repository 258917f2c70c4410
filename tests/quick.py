"""Which cases of a test `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest


def few_quick(cases: Iterable[object], quick: int) -> list[Any]:
    """The first cases as they are, the others marked slow."""
    left = iter(cases)
    return [*islice(left, quick), *(pytest.param(case, marks=pytest.mark.slow) for case in left)]
