"""What a run keeps and shows: its folder, metrics, history and outcome, trackers and progress."""
