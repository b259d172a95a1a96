#!/bin/bash
# Several nodes under Slurm, one torchrun a node:
#   sbatch --nodes=2 scripts/slurm.sh model=gpt2_xl data=fineweb_edu seq_len=2048
# Prepare the text first, on one node: python -m scripts.prepare_data data=fineweb_edu
#SBATCH --job-name=nanoflash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --output=slurm-%j.log
# the job comes back after a preemption, and checkpoint.resume=auto continues the run
#SBATCH --requeue

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun .venv/bin/torchrun \
	--nnodes="$SLURM_NNODES" \
	--nproc-per-node="$SLURM_GPUS_ON_NODE" \
	--rdzv-backend=c10d \
	--rdzv-endpoint="$head_node:29500" \
	--rdzv-id="$SLURM_JOB_ID" \
	-m train "$@"
