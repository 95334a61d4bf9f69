"""`largebatch audit` on loops of other libraries: files of `audit/`, written against their public interface.

    python bench/audit.py

Writes bench/results/audit and docs/conformance.md. `audit/subjects.json` lists what is asked of which loop.
"""

import argparse
import contextlib
import io
import json
import os
import re
from typing import Any

from largebatch.__main__ import main as largebatch
from largebatch.tools.local_jobs.jobs import PRELOAD
from record import RESULTS, ROOT, Record, section, take_facts

LOOPS = ROOT / "bench/audit"
PAGE = ROOT / "docs/conformance.md"
TITLE = "What the optimizer gets in other libraries"
ABOUT = """For anyone who trains on several GPUs with another library, and wonders what its optimizer gets: the
[audit]({docs}audit.md) of [small loops]({bench}audit) that we wrote against these libraries' public interface, with 8
samples a step, on 1 and 2 CPU processes (W) with 1 and 2 micro-batches (A) each, or one where negatives are shared.
Where it is "the same", the optimizer gets the gradient and the learning rates of one process in each of these layouts.
Where it differs, that may be by design, or follow from the loss. The fourth column is about a step on the 5 samples
that may be left at the end: how much each counts, as a multiple of what it does in one process; it is empty if they
were not compared. A link leads to a public discussion. torch's `SyncBatchNorm` is missing: it needs a GPU."""
HEADER = ["| package | asked | the optimizer gets | 5 samples left | discussed |", "| --- | --- | --- | --- | --- |"]


def ask(subject: dict[str, str]) -> dict[str, Any]:
    """What the audit says of a subject, as JSON."""
    words = ["--batch=8", "--world-sizes=1,2", f"--accumulations={subject.get('accumulations', '1,2')}"]
    if "strategy" in subject:
        words.append(f"--accelerate=recipes/accelerate_configs/{subject['strategy']}.yaml")
    output = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
        largebatch(["audit", str(LOOPS / subject["loop"]), "--json", *words])
    # A loop that cannot be audited has no answer, and its error stands above.
    answer: dict[str, Any] = json.loads(output.getvalue())
    return answer


def row_of(subject: dict[str, str], said: dict[str, Any]) -> str:
    """A row of the table: without remedies."""
    wrong = [re.split(r"(?<=\)): |; (?=[a-z])", each)[0] for each in said["wrong"]]
    left = [each for each in said["remarks"] if "are left at the end" in each]
    counts = re.findall(r"[\d.]+(?= to| times)", left[0]) if left else []
    span = (
        f"{min(counts, key=float)} to {max(counts, key=float)}"
        if counts
        else "another gradient"
        if left
        else "the same"
    )
    repository, _, number = subject.get("report", "").partition("#")
    link = f"[{repository}#{number}](https://github.com/{repository}/issues/{number})" if number else ""
    found = "**differs**: " + "; ".join(wrong) if wrong else "the same"
    return f"| {subject['package']} | {subject['asked']} | {found} | {'' if wrong else span} | {link} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Audit loops of other libraries.")
    parser.add_argument("--only", default="", help="a regular expression in the name of a loop; writes nothing")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", PRELOAD: "transformers.trainer,trl,lightning,sentence_transformers"}
    subjects = json.loads((LOOPS / "subjects.json").read_text())
    facts = take_facts(sorted({each["package"] for each in subjects}))
    rows = []
    for subject in subjects:
        if re.search(options.only, subject["loop"]):
            rows.append(subject | ask(subject))
            print(row_of(subject, rows[-1]), *rows[-1]["remarks"], sep="\n  ", flush=True)
    if options.only:
        return
    facts["load average after"] = round(os.getloadavg()[0], 2)
    table = "\n".join([*HEADER, *(row_of(each, each) for each in rows)])
    for page, docs, bench in ((PAGE, "", "../bench/"), (RESULTS / "audit/README.md", "../../../docs/", "../../")):
        about = ABOUT.format(docs=docs, bench=bench)
        record = Record("audit", TITLE, about, {}, facts)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n".join([f"# {TITLE}", "", *section(record)[:-1], table, ""]))
    (RESULTS / "audit/results.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
