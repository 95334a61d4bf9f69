"""Numbers with their nouns, for messages."""


def counted(number: float, one: str, many: str | None = None, form: str = ",") -> str:
    """ "1 step", "2,000 steps", "0.5 epochs".

    Args:
        number: How many; 1 alone is singular, after it is formatted.
        one: The noun in the singular.
        many: In the plural; None appends an s.
        form: The number's format specification.
    """
    shown = format(number, form)
    return f"{shown} {one if shown == '1' else many or one + 's'}"
