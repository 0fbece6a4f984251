"""Benchmarks: one file per claim of the README. Each compares with a peer in the same run, prints
the ratio first and ends with one JSON line of claims (bench/report.py)."""
