"""The comparison and the projection as Markdown."""

from largebatch.estimate.step_time import EXPOSED_SHARE, MFU

TOLERANCE = 0.05
INEFFICIENT = 0.9

HEAD = """# Scale, on paper

`python bench/scale/scale.py bench/results/scale`, {when}, Python {python}. Nothing here was measured on GPUs.
Formulas and their sources are in src/largebatch/estimate/step_time.py, which `largebatch plan --gpu` uses, too;
published figures and data sheets are in bench/scale/published.py.

## Against published figures

A collective takes a latency for each hop and a time for each byte, within a node and between nodes, and each strategy
sends what its engine sends. A forward or backward pass takes the longer of computing and communicating, plus the
"exposed share" of the shorter. The computing time is that of a series' smallest number of GPUs, and efficiency is a
GPU's throughput relative to it.

One constant is fitted, to the {num_fitted} figures marked so: the exposed share, {share:.2f} ({share_of_all:.2f} if
fitted to all). {num_held_out} figures are held out:

| held out | figures | within {tolerance:.0%} | root mean square | largest | a model that always says 1 |
| --- | --- | --- | --- | --- | --- |
{summary}

The first series (llm-foundry, torchtitan, Goyal et al.) were known when the form of the model was chosen; those below
them were added afterward, without changing anything.
"""

AFTER_COMPARISON = """
Where it is off, and why:

- **oumi**: the order is right, HYBRID_SHARD above FULL_SHARD, but the model makes both too efficient. The 50 Gb/s of a
  virtual machine are an upper limit, reached over TCP if at all, and the reference is one node without any network.
  HYBRID_SHARD reduces between nodes once in 16 micro-batches: it would take a tenth of that bandwidth, or other costs
  of several nodes, to explain 0.857.
- **DLPerf**: the reference is a single GPU, which communicates nothing. Already 8 GPUs in one node lose 2 to 8 %, where
  the model has about 1 %: slow processes and the host's share are not modeled. One 100 Gb/s port serves 8 GPUs on two
  sockets, so that half of them reach it through both CPUs.
- **Horovod**: 128 and 512 GPUs send the same bytes in a ring, and get the same efficiency here; published are 0.79 and
  0.68. Images per second on a single P100 are those of another machine.
- **KempnerForge**: 8 nodes are slower than the model says; tensor parallelism communicates at the same time, which is
  counted as computing here.

For Goyal et al., 0.90 is from the abstract; sections 4 and 5.5 of the paper were only read as an issue tracker quotes
them. llm-foundry's figures for 8 H100s and for 128 or more are from two tables, which MPT-7B's series combines; the
source does not say what network connects them. Left out: MPT-1B on 32 A100s, which is a fifth slower than on 16 and on
64; KempnerForge's figures that change the micro-batch or the parallelism with the number of GPUs, such as its 53 %;
cosmos-framework#162, which names neither the model's size nor the network's speed; DLPerf's mixed precision, whose
gradients' precision is not said; TensorFlow's tables of one node, which are not of data-parallel processes.

There is no term for stragglers. With little to communicate, the model is too optimistic (MPT-70B; MPT-350M on A100s),
which suggests one, but a term fitted to the same figures made the others worse. Congestion, or a network below its data
sheet, is not in the model either.

## This project's recipes

What `largebatch plan --gpu h100 --network 400G/gpu` says: nodes of 8 H100 with 450 GB/s of NVLink and 50 GB/s of
network per GPU in one direction (data sheets), computing at an MFU of {mfu}, an exposed share of {exposed}. Each cell
has seconds per step and efficiency, the part of a step that computing alone would take, from least to most. "No room":
it is not estimated to fit in 80 GB.

No published figure checks the columns above 512 GPUs. There, the latency of a ring's hops dominates, once for each of
FSDP2's layers and of ZeRO-3's prefetches; one would use other algorithms than rings, or shard within nodes.

ZeRO-1 and ZeRO-2 are counted as DeepSpeed 0.19.8 implements them: it all-reduces gradients (twice their bytes), while
the ZeRO paper reduce-scatters them (once). HSDP is FSDP2 in each node, which reduces there with each micro-batch,
and over nodes with the last one.
"""

RECIPE = """
### {name}

{params:,.0f} M parameters; a micro-batch of {micro_batch_size} takes {flops:.3g} floating-point operations.
"""


def readme(about: dict) -> str:
    """All of it, from what `scale.json` holds."""
    compared = about["published"]
    held_out = [point for point in compared if not point["fitted"]]
    groups = {
        f"published under {INEFFICIENT}": [each for each in held_out if each["published"] < INEFFICIENT],
        f"published from {INEFFICIENT} on": [each for each in held_out if each["published"] >= INEFFICIENT],
    }
    text = HEAD.format(
        when=about["when"],
        python=about["versions"]["python"],
        num_fitted=len(compared) - len(held_out),
        share=about["exposed_share"],
        share_of_all=about["exposed_share_of_all"],
        num_held_out=len(held_out),
        tolerance=TOLERANCE,
        summary="\n".join(_summary(title, points) for title, points in groups.items()),
    )
    text += "\n" + "\n".join(_comparison(compared)) + "\n"
    text += AFTER_COMPARISON.format(mfu=_to(*MFU), exposed=_to(*EXPOSED_SHARE))
    for name, recipe in about["recipes"].items():
        text += RECIPE.format(
            name=name,
            params=recipe["parameters"] / 1e6,
            micro_batch_size=recipe["micro_batch_size"],
            flops=recipe["micro_batch_flops"],
        )
        for title in ("the recipe's global batch", "one micro-batch per GPU"):
            text += f"\nWith {title}:\n\n" + "\n".join(_projection(recipe[title])) + "\n"
    return text


def _summary(title: str, points: list[dict]) -> str:
    errors = [_error(point) for point in points]
    perfect = [1 / point["published"] - 1 for point in points]
    return (
        f"| {title} | {len(points)} | {_num_within(errors)} | {_root_mean_square(errors):.1%} | "
        f"{max(errors, key=abs):+.1%} | {_root_mean_square(perfect):.1%} |"
    )


def _to(least: float, most: float) -> str:
    return f"{least:.3g}" if f"{least:.3g}" == f"{most:.3g}" else f"{least:.3g} to {most:.3g}"


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
        texts = [
            f"{_to(*cell['seconds'].values())} s, {_to(*(round(each, 2) for each in cell['efficiency'].values()))}"
            if cell["fits"]
            else "no room"
            for cell in row
        ]
        lines.append(f"| {strategy} | " + " | ".join(texts) + " |")
    return lines
