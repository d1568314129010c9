"""Speed: sweep-bench, bench, batched-bench, comparisons in turns, and what a measurement ran on."""
