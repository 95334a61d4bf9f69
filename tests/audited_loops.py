"""The loops of docs/audit.md, and changes to them."""

import re

from paths import ROOT

PAGE = (ROOT / "docs/audit.md").read_text()
EXAMPLES = {re.match(r"# (\w+)\.py", block)[1]: block for block in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)}


def changed(text, *changes):
    """A text in which each first part is replaced by the second one."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text
