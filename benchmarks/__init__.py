"""What drumline costs, measured: each module but `run` and those it shares is a benchmark."""
