"""Whether `largebatch critical-batch` finds the critical batch of a noisy quadratic, which is known in closed form.

    python bench/critical_batch.py --seeds 6

Branches at 1, 2, 4, 8 and 16 times the batch are compared with the expected loss at the end of their window. Writes
bench/results/critical_batch/README.md.
"""

import argparse
import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from record import RESULTS, ROOT

sys.path.insert(0, str(ROOT / "tests"))

from largebatch.tools.command_line import main as largebatch
from largebatch.tools.sweep.points import BATCH as SIZE
from largebatch.tools.sweep.results import Results
from quadratic import BATCH, STEP, WINDOW, expected_loss, train

TOLERANCE = 0.0135
MULTIPLES = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="of each batch; default: 6")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "branches")
        before = train(Path(temporary, "run"), STEP)
        batches = ",".join(map(str, MULTIPLES))
        command = ["critical-batch", f"{temporary}/run", "--at", str(STEP), "--batches", batches]
        command += ["--window", str(WINDOW), "--tolerance", str(TOLERANCE)]
        printed = io.StringIO()
        with redirect_stdout(printed):
            code = largebatch([*command, "--seeds", str(options.seeds), "--folder", str(folder)])
        assert code == 0, printed.getvalue()
        cells = {group.settings[SIZE]: group.cell for group in Results.read(folder).groups}
    expected = {BATCH * multiple: expected_loss(multiple, before) for multiple in MULTIPLES}
    known = max(size for size, loss in expected.items() if loss - expected[BATCH] <= TOLERANCE)
    rows = [
        f"| {size} | {expected[size]:.4f} | {cell.mean:.4f} ± {cell.standard_error:.4f} | "
        f"{expected[size] - expected[BATCH]:+.4f} | {cell.mean - cells[BATCH].mean:+.4f} |"
        for size, cell in cells.items()
    ]
    finding = next(line for line in printed.getvalue().splitlines() if line.startswith("after step"))
    text = "\n".join(
        [
            "# Critical batch of a noisy quadratic",
            "",
            f"`python bench/critical_batch.py --seeds {options.seeds}`: SGD, the linear rule, {WINDOW} samples after "
            f"step {STEP}. With a tolerance of {TOLERANCE}, the critical batch is {known} in closed form.",
            "",
            "| batch | expected loss | measured, ± standard error | expected difference | measured difference |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"The command: {finding}.",
            "",
        ]
    )
    result = RESULTS / "critical_batch/README.md"
    result.parent.mkdir(exist_ok=True)
    result.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(0 if f"the critical batch is {known};" in finding else 1)


if __name__ == "__main__":
    main()
