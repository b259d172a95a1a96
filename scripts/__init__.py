"""Commands beside training; each runs as python -m scripts.<name> and prints its arguments with --help."""
