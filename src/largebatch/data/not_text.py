"""Tells of strings that are not text."""


def not_text_in(text: str) -> str | None:
    """A zero byte, half of a character, or a byte that is not UTF-8 and was read with "surrogateescape", in words."""
    if "\0" in text:
        return "a zero byte"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return f"the byte {code - 0xDC00:#x}" if 0xDC80 <= code <= 0xDCFF else f"half of a character, {code:#x}"
    return None
