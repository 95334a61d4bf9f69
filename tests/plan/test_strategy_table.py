"""What the table of strategies says about autocast."""

import pytest

from largebatch.plan.strategies import STRATEGIES, caches_casts


@pytest.mark.parametrize(("recomputes", "cached"), [(False, {"single", "ddp", "zero1", "zero2"}), (True, set())])
def test_copies_of_weights_are_cached_only_where_autograd_keeps_them_anyway(recomputes, cached):
    assert {name for name in ("single", *STRATEGIES) if caches_casts(name, recomputes)} == cached
