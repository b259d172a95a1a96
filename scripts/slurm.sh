#!/bin/bash
# Several nodes under Slurm, one torchrun a node:
#   sbatch --nodes=2 scripts/slurm.sh model=gpt2_xl data=fineweb_edu seq_len=2048 tokens_per_step=524288
# Prepare the text first, on one node: python -m scripts.prepare_data data=fineweb_edu
# The nodes share this folder: every process writes its shard of a checkpoint into runs/.
#SBATCH --job-name=nanoflash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
# a preempted job comes back, and checkpoint.resume=auto continues the run
#SBATCH --requeue
# three minutes before the time limit this script is told, stops the run and puts it back into the queue
#SBATCH --signal=B:USR1@180

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is set by Slurm alone: start this script with sbatch, as its first lines show}"
# no `| head -n 1`, which would end this script without a word where the names of many nodes still come
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
# another one for another job, which may have a part of the same node
port=$((20000 + SLURM_JOB_ID % 10000))

# since Slurm 22.05 srun does not take it from the job, and all processes would share one core
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# how long torchrun leaves its workers to finish their step and save before it kills them
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150
# a worker that dies, or that the watchdog ends because a rank hangs, is started again with all the others
srun .venv/bin/torchrun \
	--nnodes="$SLURM_NNODES" \
	--nproc-per-node="$SLURM_GPUS_ON_NODE" \
	--rdzv-backend=c10d \
	--rdzv-endpoint="$head_node:$port" \
	--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
	--max-restarts=3 \
	-m train "$@" &
training=$!

time_is_up=no
# srun passes SIGTERM on to torchrun, and torchrun to its workers, which save and end
trap 'time_is_up=yes; kill -TERM "$training"' USR1
trap 'kill -TERM "$training"' TERM

code=0
# a trapped signal ends `wait` early: wait until the training is really over
while kill -0 "$training" 2>/dev/null; do
	code=0
	wait "$training" || code=$?
done
if [ "$time_is_up" = yes ] && [ "$code" -ne 0 ]; then
	scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
