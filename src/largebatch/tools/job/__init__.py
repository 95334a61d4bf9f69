"""What a job of a cluster does outside of training."""
