"""Read results and logs of many runs and draw them on one HTML page."""
