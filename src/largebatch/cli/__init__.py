"""The `largebatch` command: one module a subcommand, imported only when it is called; `parser` has their words."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from largebatch.cli.parser import build_parser
from largebatch.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 a check failed, 2 the input cannot be used."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may have bytes that are no text.
        sys.stdout.reconfigure(errors="surrogateescape")
    parser = build_parser()
    options, overrides = parser.parse_known_args(arguments)
    try:
        code = _run(parser, options, overrides)
        # Here, where it can still be told, rather than when Python ends.
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever reads has seen enough, such as `head`. When Python ends it writes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, overrides: list[str]) -> int:
    """Call what the command line asks for."""
    if options.command == "plan" and options.world_size is not None:
        if options.gpu_memory or options.script or options.accelerate_configs:
            parser.error("--gpu-memory, --script and --accelerate-configs go with --world-sizes")
        from largebatch.cli.plan import print_plan

        print_plan(options.config, overrides, options.world_size, as_json=options.json)
    elif options.command == "plan":
        from largebatch.cli.comparison import print_comparison

        print_comparison(
            options.config,
            overrides,
            options.world_sizes,
            options.gpu_memory,
            options.script,
            options.accelerate_configs,
            as_json=options.json,
        )
    elif options.command == "verify":
        from largebatch.cli.verify import verify as verify_recipe

        agree = verify_recipe(
            options.config,
            overrides,
            options.strategies,
            options.world_sizes,
            options.micro_batch_sizes,
            options.steps,
            options.script,
            options.accelerate_configs,
            options.output,
            stand_in=options.stand_in,
        )
        return 0 if agree else 1
    elif options.command == "preflight":
        from largebatch.cli.preflight import print_report

        print_report(
            options.config,
            options.accelerate_config,
            overrides,
            options.folder,
            options.token,
            options.rendezvous,
            options.gpus,
            options.world_size,
        )
    elif options.command == "submit":
        from largebatch.cli.submit import submit as submit_recipe

        submitted = submit_recipe(
            options.recipe,
            options.nodes,
            options.gpus_per_node,
            options.strategy,
            options.run_dir,
            overrides,
            options.dry_run,
        )
        return 0 if submitted else 1
    elif options.command == "train-tokenizer":
        from largebatch.config import load_config
        from largebatch.data.train_tokenizer import train_tokenizer

        num_tokens = train_tokenizer(load_config(options.config, overrides), options.vocab_size, options.out)
        print(f"{num_tokens:,} tokens; write data.tokenizer {options.out} and a model.vocab_size of at least that")
    elif overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    elif options.command == "checkpoints":
        from largebatch.cli.checkpoints import print_checkpoints

        return 0 if print_checkpoints(options.run_dir, options.verify) else 1
    elif options.command == "report":
        from largebatch.cli.report import write_report_of

        write_report_of(options.run_dirs, options.out)
    elif options.command == "completion":
        from largebatch.cli.completion import print_completion

        print_completion(parser, options.shell)
    elif options.command == "lint":
        from largebatch.cli.lint import print_findings

        return 0 if print_findings(options.files) else 1
    elif options.command == "new":
        from largebatch.cli.new import new as new_bundle

        new_bundle(options.folder, options.recipe, options.strategy, options.vendor)
    elif options.command == "effective-batch":
        from largebatch.cli.effective_batch import print_effective_batch

        print_effective_batch(options)
    elif options.command == "export":
        from largebatch.checkpoint.export import export as export_checkpoint

        manifest = export_checkpoint(options.checkpoint, options.out, options.dtype)
        print(f"the weights after step {manifest.step:,} are in {options.out}")
    elif options.command == "preflight-verdict":
        from largebatch.cli.preflight import print_verdict

        return print_verdict(options.reports, options.nodes, options.bad_nodes)
    elif options.markdown:
        from largebatch.config.reference import configuration_reference

        sys.stdout.write(configuration_reference())
    else:
        from largebatch.config.schema import recipe_schema

        sys.stdout.write(recipe_schema())
    return 0
