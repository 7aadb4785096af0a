"""`llamac doctor`: checks of the installation, and of the machine (--preflight)."""
