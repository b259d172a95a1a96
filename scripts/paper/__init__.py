"""The experiments of the FlashAttention paper, one file each; scripts/reproduce_paper.py runs them."""
