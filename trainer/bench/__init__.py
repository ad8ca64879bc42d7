"""Benchmarks of the trainer's parts; every number is printed beside a ceiling measured in the same run."""
