"""Critical batches: what `advise` reads of a run, and of a table of points."""

import json
from pathlib import Path
from random import Random

from fuzzing.cases import Case
from fuzzing.mutations import TEXTS, change_bytes, change_json, cut, insert, replace_by_kind

NOISE = {"samples": 500.0, "low": 400.0, "high": 700.0, "measurements": 50}
POINTS = [["batch", "samples", "spread", "seeds", "every"]] + [
    [str(2**power), str(20_000 + 30 * 2**power), "500", "3", "640"] for power in range(5, 12)
]


def case(random: Random, folder: Path) -> Case:
    """A damaged measurement or table, or words that are out of the ordinary."""
    points = folder / "points.csv"
    measured = folder / "run/summary.json"
    measured.write_text(json.dumps({"noise_scale": NOISE}))
    rows = [list(row) for row in POINTS]
    file, source = random.choice(((points, points), (measured, measured.parent)))
    words = ["--fit" if file is points else "--measured", str(source), "--batches", "64,256,1024"]
    kind = random.randrange(4)
    if kind == 0:
        words[random.randrange(1, len(words))] = random.choice(TEXTS)
    elif kind == 1:
        for _ in range(random.randint(1, 3)):
            row = random.choice(rows)
            row[random.randrange(len(row))] = random.choice(TEXTS).encode(errors="replace").decode()
        rows *= random.choice((1, 1, 1, 1000))
    points.write_text("\n".join(",".join(row) for row in rows) + "\n")
    if kind > 1:
        random.choice((change_json, change_json, change_json, change_bytes, cut, insert, replace_by_kind))(random, file)
    return Case(["advise", *words], folder)
