"""Measure speed: sweep-bench, bench, batched-bench, interleaved comparisons, and what a measurement ran on."""
