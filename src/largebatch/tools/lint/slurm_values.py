"""Values of Slurm's options: times, numbers of nodes, GPUs. What is none is a ValueError."""

import re

_MINUTES = re.compile(r"(\d+)(?::(\d+))?")
_HOURS = re.compile(r"(\d+):(\d+):(\d+)")
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_NODES = re.compile(r"(\d+)([kKmM]?)(?:-(\d+)([kKmM]?))?")
_GPUS = re.compile(r"(?:[A-Za-z][\w.+-]*:)?(\d+)")
_GRES = re.compile(r"(?:gres[:/])?gpu(?::[A-Za-z][\w.+-]*)?(?::(\d+))?")
_THOUSANDS = {"": 1, "k": 1024, "m": 1024**2}


def seconds(text: str) -> int | None:
    """A time limit in seconds, of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None is no limit."""
    if text.lower() in ("unlimited", "infinite", "0", "-1"):
        return None
    if match := _MINUTES.fullmatch(text):
        minutes, rest = (int(part or 0) for part in match.groups())
        return minutes * 60 + rest
    match = _HOURS.fullmatch(text)
    if match is None and not (match := _DAYS.fullmatch(text)):
        raise ValueError(f"{text!r} is no time")
    days, hours, minutes, rest = ((0,) * (4 - len(match.groups()))) + tuple(int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def node_counts(text: str) -> range:
    """The numbers of nodes that `4` or `2-4` allows."""
    match = _NODES.fullmatch(text)
    if match:
        least = int(match[1]) * _THOUSANDS[match[2].lower()]
        most = int(match[3]) * _THOUSANDS[match[4].lower()] if match[3] else least
        if 1 <= least <= most:
            return range(least, most + 1)
    raise ValueError(f"{text!r} is no number of nodes")


def gpus(text: str) -> int:
    """The GPUs of `8`, `h100:8` or `h100:4,a100:4`."""
    matches = [_GPUS.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"{text!r} is no number of GPUs")
    return sum(int(match[1]) for match in matches if match)


def gpus_of_gres(text: str) -> int:
    """The GPUs of a list of generic resources such as `gpu:8`, `gpu:h100:8` or `gpu,nvme:1`; 0 where it has none."""
    count = 0
    for part in text.split(","):
        if match := _GRES.fullmatch(part):
            count += int(match[1] or 1)
        elif "gpu" in re.split(r"[:/=]", part):
            raise ValueError(f"{part!r} is no number of GPUs")
    return count
