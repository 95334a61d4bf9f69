"""The line that a run prints for a logged step."""

from largebatch.run.record.progress import progress

LOGGED = {"step": 10, "loss": 1.2345, "lr": 0.1, "samples_per_second": 1500.0, "seconds": 4.0}


def test_line_of_a_logged_step():
    # 430 steps are left at 0.4 s each.
    text = progress(LOGGED, 440, 0.4)
    assert text == "step 10/440: loss 1.2345, lr 0.1, 1,500 samples/s, 02:52 left"


def test_tokens_and_utilization():
    text = progress(LOGGED | {"tokens_per_second": 90000.0, "mfu": 0.4}, 440, 0.4)
    assert text == "step 10/440: loss 1.2345, lr 0.1, 90,000 tokens/s, mfu 40.0%, 02:52 left"
