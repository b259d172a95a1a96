"""Commands beside training; each runs as python -m scripts.<name> and prints its arguments with --help."""

from train.interruption import end_at_ctrl_c

# python -m scripts.<name> imports this first
end_at_ctrl_c()
