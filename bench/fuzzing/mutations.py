"""Random changes of JSON values and of files."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

# --- JSON -------------------------------------------------------------------------------------------------------------

# Text that `as_text` puts in place of a string: no value of Python's becomes this JSON.
RAW = {
    '"<digits>"': "9" * 5000,
    '"<exponent>"': "1e999",
    '"<nesting>"': "[" * 100_000 + "]" * 100_000,
    # As deep as Python's parser goes, or nearly.
    '"<deep>"': '{"x": ' * 940 + "1" + "}" * 940,
}
EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *(2**24, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 10**40, "<digits>", "<nesting>", "<deep>", "<exponent>"),
    *("", "x", "²", "\0", "\ud800", "\x1b[31mred", "../../x", "/dev/zero", "x" * 100_000, "none", "auto"),
    *([], {}, [[]], [{}], {"x": 1}, [None], [1, "x"], [2**62] * 10_000),
)
Container = dict[str, Any] | list[Any]


def places(value: Any) -> Iterator[tuple[Container, Any]]:
    """The containers and keys of all values inside a value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def replace(random: Random, container: Any, key: Any) -> None:
    container[key] = copy.deepcopy(random.choice(EXTREMES))


def change_number(random: Random, container: Any, key: Any) -> None:
    number = container[key]
    if isinstance(number, int | float) and not isinstance(number, bool):
        choices = (number + 1, number - 1, -number, number * 10 ** random.randrange(20), number / 3, str(number))
        container[key] = random.choice(choices)


def delete(_: Random, container: Any, key: Any) -> None:
    del container[key]


def repeat(random: Random, container: Any, key: Any) -> None:
    container[key] = [copy.deepcopy(container[key]) for _ in range(random.choice((1, 2, 1000)))]


def add_keys(random: Random, container: Any, _: Any) -> None:
    if isinstance(container, dict):
        count = random.choice((1, 1, 1, 100, 200_000))
        container |= {f"{random.choice('xyz')}{number}": number for number in range(count)}


def rename(_: Random, container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container[f"{key}²"] = container.pop(key)


MUTATIONS = (replace, replace, replace, change_number, delete, repeat, add_keys, rename)


def mutate(random: Random, value: Any) -> Any:
    """Change a JSON value in one to three random places, of which one may be the whole of it."""
    holder = [value]
    for _ in range(random.randint(1, 3)):
        if found := list(places(holder)):
            random.choice(MUTATIONS)(random, *random.choice(found))
    return holder[0] if holder else None


def as_text(value: Any) -> bytes:
    """A mutated value as JSON, which may be out of the ordinary."""
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(name, raw)
    return text.encode()


# --- files ------------------------------------------------------------------------------------------------------------


def change_bytes(random: Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(random.randint(1, 4)):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def cut(random: Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: random.randrange(len(content) + 1)])


def insert(random: Random, file: Path) -> None:
    content = file.read_bytes()
    junk = random.choice((b"\0", b"\xff\xfe", b"\n", b"{}", b"\x1b[2J", b"[" * 100_000))
    place = random.randrange(len(content) + 1)
    file.write_bytes(content[:place] + junk + content[place:])


def replace_by_kind(random: Random, file: Path) -> None:
    """Put something other than a file in a file's place."""
    file.unlink()
    kind = random.choice(("nothing", "fifo", "folder", "loop", "link", "device", "sparse", "unreadable"))
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        with file.open("wb") as opened:
            opened.truncate(30 * 2**30)
    elif kind == "unreadable":
        file.touch(mode=0)
    elif kind != "nothing":
        targets = {"loop": file.name, "device": "/dev/zero", "link": "../secret.json"}
        file.symlink_to(targets[kind])


def change_json(random: Random, file: Path) -> None:
    """Mutate the value of a JSON file or, in one of JSON lines, of some lines; the bytes of any other file."""
    if file.suffix == ".safetensors":
        # The length of its header, the header, and the tensors.
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = as_text(mutate(random, json.loads(content[8:end])))
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        return
    if file.suffix not in (".json", ".jsonl"):
        change_bytes(random, file)
        return
    lines = file.read_bytes().splitlines() if file.suffix == ".jsonl" else [file.read_bytes()]
    for number in random.sample(range(len(lines)), min(len(lines), random.randint(1, 3))):
        lines[number] = as_text(mutate(random, json.loads(lines[number])))
    file.write_bytes(b"\n".join(lines) + b"\n")


def damage(random: Random, folder: Path) -> None:
    """Damage one to three files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in random.sample(files, min(len(files), random.randint(1, 3))):
        kinds = (change_bytes, cut, insert, replace_by_kind, *[change_json] * 6)
        random.choice(kinds)(random, file)


# --- words of command lines and values of variables -----------------------------------------------------------------

TEXTS = (
    *("", " ", "0", "1", "-1", "1.5", "1e999", "nan", "inf", "²", "٣", "true", "null", "none", "x", "a,b", ",", "="),
    *("--", "-", "--x", "--=", "--.", "--x.", "--batch", "--model.hidden_size", "--optimizer", "[]", "{}", '"', "{"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "99999999999999999999", "9" * 5000, "[" * 100_000),
    *(
        "x" * 100_000,
        "/".join(["x"] * 3000),
        "../x",
        ".",
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
        "a\nb",
        "\x1b[31m",
    ),
    *("\udcff", "$(id)", "`id`", "%j", "4-2", "2-4", "1-99999999", "recipes", "recipes/causal_lm", "gpt_pydoc"),
)
