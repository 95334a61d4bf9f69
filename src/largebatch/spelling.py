"""Names that are known and nearly what was written, for messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ", did you mean gpt2_124m?", to be put behind what is wrong; empty where nothing known is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""
