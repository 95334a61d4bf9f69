"""The comparison and the projection as Markdown."""

TOLERANCE = 0.05

HEAD = """# Scale, on paper

`python bench/scale/scale.py bench/results/scale`, {when}, Python {python}. Nothing here was measured on GPUs.
Formulas and their sources are in bench/scale/model.py; published figures, data sheets and latencies are in
bench/scale/published.py.

## Against published figures

A collective takes a latency for each hop and a time for each byte, within a node and between nodes, and each strategy
sends what its engine sends. A forward or backward pass takes the longer of computing and communicating, plus the
"exposed share" of the shorter. The computing time is that of a series' smallest number of GPUs, and efficiency is a
GPU's throughput relative to it.

One constant is fitted, to the {num_fitted} figures marked so: the exposed share, {share:.2f} ({share_of_all:.2f} if
fitted to all). Of {num_held_out} figures held out, {within} are within {tolerance:.0%}; the errors' root mean square
is {rms:.1%}, the largest {largest:+.1%}. Efficiencies near 1 make that a mild test: for a model that always says
1, these are {perfect_within} within {tolerance:.0%}, {perfect_rms:.1%} and {perfect_largest:+.1%}. The figures were
held out from the fit, but were known when the form of the model was chosen.
"""

AFTER_COMPARISON = """
For Goyal et al., 0.90 is from the abstract; sections 4 and 5.5 of the paper were only read as an issue tracker quotes
them. llm-foundry's figures for 8 H100s and for 128 or more are from two tables, which MPT-7B's series combines; the
source does not say what network connects them. One figure was left out of its series: MPT-1B on 32 A100s, which is a
fifth slower than on 16 and on 64.

There is no term for stragglers. With little to communicate, the model is too optimistic (MPT-70B; MPT-350M on A100s),
which suggests one, but a term fitted to the same figures made the others worse. Congestion, or a network below its data
sheet, is not in the model either.

## This project's recipes

Assumed, not measured: nodes of 8 H100 with {node:g} GB/s of NVLink and {net:g} GB/s of network per GPU in one
direction (data sheets); computing at an MFU of {mfu:g} of {peak:g} TFLOP/s (`--mfu`, `--peak`); the exposed share
from above. Weights are gathered and gradients reduced in fp32, as this project does. Efficiency is computing time
divided by the time of the step. "No room": weights, gradients and Adam's moments alone take more than {memory:g} GB of
each GPU; whether activations fit beside them is not considered.

No published figure checks the columns above 512 GPUs. There, the latency of a ring's hops dominates, once for each of
FSDP2's layers and of ZeRO-3's prefetches; one would use other algorithms than rings, or shard within nodes.

ZeRO-1 and ZeRO-2 are counted as DeepSpeed 0.19.8 implements them: it all-reduces gradients (twice their bytes), while
the ZeRO paper reduce-scatters them (once). HSDP is FSDP2 in each node and a sum between nodes; there is no Accelerate
config for it here.
"""

RECIPE = """
### {name}

{params:,.0f} M parameters; a micro-batch of {micro_batch_size} x {tokens:,} tokens takes {computing:.0f} ms.
"""


def readme(about: dict) -> str:
    """All of it, from what `scale.json` holds."""
    compared, inputs = about["published"], about["inputs"]
    held_out = [point for point in compared if not point["fitted"]]
    errors = [_error(point) for point in held_out]
    perfect = [1 / point["published"] - 1 for point in held_out]
    text = HEAD.format(
        when=about["when"],
        python=about["versions"]["python"],
        num_fitted=len(compared) - len(held_out),
        share=about["exposed_share"],
        share_of_all=about["exposed_share_of_all"],
        num_held_out=len(held_out),
        tolerance=TOLERANCE,
        within=_num_within(errors),
        rms=_root_mean_square(errors),
        largest=max(errors, key=abs),
        perfect_within=_num_within(perfect),
        perfect_rms=_root_mean_square(perfect),
        perfect_largest=max(perfect, key=abs),
    )
    text += "\n" + "\n".join(_comparison(compared)) + "\n"
    text += AFTER_COMPARISON.format(
        node=inputs["fabric"]["node_bandwidth"] / 1e9,
        net=inputs["fabric"]["net_bandwidth"] / 1e9,
        mfu=inputs["mfu"],
        peak=inputs["peak"] / 1e12,
        memory=inputs["memory"] / 1e9,
    )
    for name, recipe in about["recipes"].items():
        workload = recipe["workload"]
        text += RECIPE.format(
            name=name,
            params=workload["params"] / 1e6,
            micro_batch_size=workload["micro_batch_size"],
            tokens=workload["tokens"],
            computing=recipe["computing_seconds"] * 1e3,
        )
        for title in ("the recipe's global batch", "one micro-batch a GPU"):
            text += f"\nWith {title}:\n\n" + "\n".join(_projection(recipe[title])) + "\n"
    return text


def _error(point: dict) -> float:
    """The model's efficiency against the published one, relative."""
    return point["model"] / point["published"] - 1


def _num_within(errors: list[float]) -> int:
    return sum(abs(error) <= TOLERANCE for error in errors)


def _root_mean_square(values: list[float]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def _comparison(compared: list[dict]) -> list[str]:
    """Each published figure beside the model's; those held out and missed stand out."""
    sources = list(dict.fromkeys(point["source"] for point in compared))
    lines = ["| | source | GPUs | published | model | error | |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for point in compared:
        error = f"{_error(point):+.1%}"
        if abs(_error(point)) > TOLERANCE:
            error = f"**{error}**"
        use = "fitted" if point["fitted"] else "held out"
        lines.append(
            f"| {point['series']} | {sources.index(point['source']) + 1} | {point['from']} → {point['to']} | "
            f"{point['published']:.3f} | {point['model']:.3f} | {error} | {use} |"
        )
    return [*lines, "", *(f"{number}. <{source}>" for number, source in enumerate(sources, 1))]


def _projection(points: list[dict]) -> list[str]:
    """Step time and efficiency of every strategy."""
    gpus = sorted({point["gpus"] for point in points})
    cells = {(point["strategy"], point["gpus"]): point for point in points}
    batches = {point["gpus"]: point["global_batch_size"] for point in points}
    lines = ["| GPUs | " + " | ".join(f"{each:,}" for each in gpus) + " |", "| --- |" + " --- |" * len(gpus)]
    lines.append("| samples a step | " + " | ".join(f"{batches[each]:,}" for each in gpus) + " |")
    for strategy in dict.fromkeys(point["strategy"] for point in points):
        row = [cells[strategy, each] for each in gpus]
        texts = [f"{cell['seconds']:.3g} s, {cell['efficiency']:.2f}" if cell["fits"] else "no room" for cell in row]
        lines.append(f"| {strategy} | " + " | ".join(texts) + " |")
    return lines
