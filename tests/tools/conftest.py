"""Commands, run as a person runs them."""

import pytest

from largebatch.__main__ import main


@pytest.fixture
def run_command(capsys):
    """Run a command; its exit code, output and errors."""

    def run(*words):
        capsys.readouterr()
        try:
            code = main([*map(str, words)])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def output_of(run_command):
    """Run a command that succeeds; what it prints."""

    def run(*words):
        code, output, errors = run_command(*words)
        assert code == 0, errors
        return output

    return run


@pytest.fixture
def refusal_of(run_command):
    """Run a command that cannot use its input, and prints nothing else; the error."""

    def run(*words):
        code, output, error = run_command(*words)
        assert (code, output) == (2, ""), error
        return error

    return run
