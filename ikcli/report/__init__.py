"""Results and logs of many runs, read and drawn on one page of HTML."""
