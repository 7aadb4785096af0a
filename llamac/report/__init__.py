"""Reports of runs: `llamac report OUT` writes one HTML file, or exports the log to other tools."""
