"""Mixtures of experts under autocast."""

import sys


def autocast_experts() -> None:
    """Make autocast cast the experts of models of `transformers`, if there can be one."""
    if "transformers" in sys.modules:
        # Otherwise, importing it would take seconds.
        from largebatch.model.transformers_internals import cast_stacked_experts

        cast_stacked_experts()
