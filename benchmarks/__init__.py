"""Benchmarks: dtengine beside its peers, in the same run; ``python -m benchmarks.bench_SUBJECT``."""
