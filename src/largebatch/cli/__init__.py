"""The `largebatch` command: one module a subcommand, imported only when it is called."""

import argparse
import sys
from collections.abc import Sequence

from largebatch import __version__
from largebatch.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check failed, 2 the input cannot be used."""
    parser = argparse.ArgumentParser(
        prog="largebatch",
        description="Plan large-batch training recipes.",
        epilog="Exit codes: 0 done, 2 the input cannot be used.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"largebatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="explain the plan of a recipe for a number of processes",
        description="Print what a recipe would do on a number of processes; needs no GPU, no data and no torch.",
        epilog="Example: largebatch plan recipes/image_classification/resnet50_imagenet_8k.json --world-size 256. "
        "Fields are overridden as in a run: --batch.global_batch_size 512.",
        allow_abbrev=False,
    )
    plan.add_argument("config", help="the recipe's JSON file")
    plan.add_argument("--world-size", type=_positive_int, required=True, help="data-parallel processes, one a GPU")
    # A run's own option: taken so that the words of a run can be given here as they are.
    plan.add_argument("--run_dir", help=argparse.SUPPRESS)
    plan.add_argument("--json", action="store_true", help="print the resolved plan as JSON")

    commands.add_parser(
        "schema",
        help="print the JSON Schema of recipes",
        description="Print the JSON Schema that recipes name in their $schema, for editors.",
        epilog="Example: largebatch schema > recipes/recipe.schema.json",
        allow_abbrev=False,
    )

    options, overrides = parser.parse_known_args(arguments)
    try:
        if options.command == "plan":
            from largebatch.cli.plan import print_plan

            print_plan(options.config, overrides, options.world_size, as_json=options.json)
        else:
            if overrides:
                parser.error(f"unrecognized arguments: {' '.join(overrides)}")
            from largebatch.config.schema import recipe_schema

            sys.stdout.write(recipe_schema())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value
