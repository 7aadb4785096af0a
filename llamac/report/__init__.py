"""Reports of runs: `python -m llamac.report OUT` writes one HTML file, or exports the log to other tools."""
