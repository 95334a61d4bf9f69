"""`largebatch prepare`: downloads, decodes and tokenizes a recipe's data ahead of its job."""

import argparse
import json
import os
import re
import sys
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from largebatch.config import RecipeConfig, check_together, load_sections
from largebatch.config.commits import at_commits, find_commits
from largebatch.config.task_config import task_code_errors
from largebatch.data.loading import check_sizes
from largebatch.data.preparation import NotPrepared, Preparation
from largebatch.data.prepared import OtherPartsMissing
from largebatch.data.readable import check_readable
from largebatch.data.source import Batch, Sources
from largebatch.data.text import IGNORE_INDEX
from largebatch.data.tokenizer import load_tokenizer
from largebatch.errors import ConfigError, UserError, file_errors
from largebatch.storage.files import replace_file
from largebatch.task_folders import import_from
from largebatch.tools.options import add_recipe, positive_int
from largebatch.words import printable

COUNTED = ("num_train_samples", "num_eval_samples")

EPILOG = """examples:
  largebatch prepare llama_1b --workers 32
  largebatch prepare my_recipe.json --write
  sbatch slurm/prepare.sbatch llama_1b"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--workers", type=positive_int, help="processes; default: one for each CPU core")
    parser.add_argument(
        "--shard",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="prepare part I of N, such as 1/4, and leave the others to other processes or machines; tokens only",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the numbers of samples to the recipe's data.num_train_samples and data.num_eval_samples",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what is missing, and prepare nothing")
    parser.add_argument(
        "--show",
        type=positive_int,
        default=0,
        metavar="N",
        help="print N training samples of text as the model reads them, with [[ ]] around what is predicted",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="verify the checksums of prepared tokens, and read each sample once: decode each image",
    )


def run(options: argparse.Namespace) -> int:
    """Download and tokenize a recipe's data ahead of its job, whose GPUs would wait for it, and report how many samples
    there are. Tokens are kept in HF_HOME/largebatch. Finished shards are reused, and interrupted work resumes. Fields
    are overridden as in a run.
    """
    # Each process has one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    recipe = options.config
    config = load_sections(recipe, options.overrides, options.task)
    unfit = None
    try:
        check_together(config, recipe)
    except ConfigError as error:
        # It may follow from numbers of samples that are not known yet.
        unfit = error
        print(printable(f"warning: {error}\nits data is read all the same"), file=sys.stderr)
    if options.write and (options.overrides or not config.data.is_counted):
        raise UserError("--write: the numbers of this data follow from the recipe, or are overridden; remove --write")
    part, num_parts = options.shard
    preparation = Preparation(
        command=f"largebatch prepare {recipe}",
        allowed="nothing" if options.dry_run else "everything",
        verify_checksums=options.check,
        num_workers=options.workers or os.cpu_count() or 1,
        part=part,
        num_parts=num_parts,
    )
    sections = config.data.sections() or {"": config.data}
    found: dict[str, dict[str, int]] = {}
    code = 0
    for source, section in sections.items():
        where = f"{source}: " if source else ""
        # Whatever is wrong with one source, others can still be prepared.
        try:
            found[source] = _prepare(config.model_copy(update={"data": section}), where, preparation, options)
        except NotPrepared as missing:
            print(f"{where}{missing}")
            code = max(code, int(missing.job_would_refuse))
        except OtherPartsMissing:
            print(f"{where}this part of {num_parts} is prepared; others are not finished yet")
        except UserError as error:
            print(printable(f"error: {where}{error}"), file=sys.stderr)
            code = max(code, error.exit_code)
        except Exception as error:
            if unfit is None:
                raise
            # The task's code relies on what does not fit.
            raise unfit from error
    if options.write and len(found) == len(sections):
        _write(recipe, found)
        print(f"wrote these numbers to {recipe}")
        # With its numbers, it may fit together now, or not any more.
        config = load_sections(recipe, options.overrides, options.task)
    check_together(config, recipe)
    return code


def _prepare(config: RecipeConfig, where: str, preparation: Preparation, options: argparse.Namespace) -> dict[str, int]:
    """Prepare one source, or all data if there is only one, and return its numbers of samples by the config's fields.

    Every line that is printed begins with `where`.
    """
    commits = find_commits(config, {})
    for name, commit in commits.items():
        print(f"{where}{name} is read at commit {commit}; ID@COMMIT in the recipe stays there")
    config = at_commits(config, commits)
    uncounted = _without_numbers(config)
    opened = dict(zip((*COUNTED, *config.further_sets), _open(uncounted, preparation), strict=False))
    counts = {field: getattr(each, "num_available", len(each)) for field, each in opened.items()}
    for field, available in counts.items():
        name = field
        expects = ""
        if field in COUNTED:
            name = f"data.{field}"
            expects = f"; the recipe expects {getattr(config.data, field):,}"
        print(f"{where}{name:<23} {available:>15,} samples found{expects}")
        if remark := getattr(opened[field], "remark", None):
            print(printable(f"{where}{remark}"))
    if options.check:
        # Before any is fetched here: loader processes would share what a source has opened for it.
        check_readable(opened, counts, preparation.num_workers or 1)
        print(f"{where}checksums agree, and each sample can be read")
    for index in range(min(options.show, counts["num_train_samples"])):
        sample = opened["num_train_samples"].fetch(np.array([index]), 0)
        print(f"{where}sample {index}:\n{_shown(sample, getattr(config.data, 'tokenizer', 'bytes'))}")
    if options.write:
        for field in COUNTED:
            if not counts[field]:
                raise UserError(f"data.{field}: the data has no whole sample; give it more, or smaller ones")
    else:
        sources = tuple(opened.values())
        if uncounted is not config:
            # With the recipe's numbers, as a run opens it.
            sources = _open(config, replace(preparation, allowed="nothing", verify_checksums=False))
        check_sizes(sources, config.data)
    return {field: counts[field] for field in COUNTED}


def _without_numbers(config: RecipeConfig) -> RecipeConfig:
    """A config whose data is prepared and counted even if there are other numbers of samples than the recipe says."""
    if not config.data.is_counted:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update=dict.fromkeys(COUNTED, 0))})


def _open(config: RecipeConfig, preparation: Preparation) -> Sources:
    folder = config.task_folder()
    with task_code_errors(folder, blamed="data.py"):
        open_sources = import_from(folder, "data").sources
    opened: Sources = open_sources(config, preparation)
    return opened


def _shown(sample: Batch, tokenizer: str) -> str:
    """A sample's text, with [[ ]] around what is predicted.

    Raises:
        UserError: The sample is not text of which tokens are predicted.
    """
    if not sample.keys() >= {"input_ids", "labels"} or sample["labels"].ndim < 2:
        raise UserError("--show: the data is not text of which tokens are predicted; remove --show")
    inputs, labels = (sample[name][0].tolist() for name in ("input_ids", "labels"))
    positions = sample["position_ids"][0].tolist() if "position_ids" in sample else range(len(inputs))
    # The token that is read next, unless it begins what a pack keeps apart.
    following = [token if position else None for token, position in zip(inputs, positions, strict=True)]
    tokens = []
    is_predicted = False
    for token, label, after in zip(inputs, labels, [*following[1:], None], strict=True):
        tokens.append((is_predicted, token))
        is_predicted = label == after
        if label not in (after, IGNORE_INDEX):
            tokens.append((True, label))
    decode = load_tokenizer(tokenizer).decode
    texts = [(marked, decode([token for _, token in run])) for marked, run in groupby(tokens, key=itemgetter(0))]
    return "".join(f"[[{text}]]" if marked else text for marked, text in texts)


def _write(recipe: Path, found: dict[str, dict[str, int]]) -> None:
    """Replace the numbers of samples in the recipe's JSON, which is reformatted."""
    raw = json.loads(recipe.read_text(encoding="utf-8"))
    if "" in found:
        raw["data"] |= found[""]
    else:
        sources = [source | found[source["name"]] for source in raw["data"]["sources"]]
        raw["data"] |= {"sources": sources} | {field: sum(source[field] for source in sources) for field in COUNTED}
    text = json.dumps(raw, indent=2, ensure_ascii=False) + "\n"
    with file_errors(f"--write: {recipe} cannot be written", "correct that"):
        # A link to a recipe stays one.
        replace_file(recipe.resolve(), text.encode(), keep_mode=True)


def _part(text: str) -> tuple[int, int]:
    """The part, from 0, and the number of parts."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match and int(match[1]) <= int(match[2]) > 0:
        # 3/3 is another name of 0/3, so that numbers may start at 0 or at 1.
        return int(match[1]) % int(match[2]), int(match[2])
    raise argparse.ArgumentTypeError(f"{text!r} is not a part; write 1/4, …, 4/4 or 0/4, …, 3/4")
