#!/bin/bash
# A Ray cluster over the hosts of a SLURM job, and a run on it: `sbatch examples/clusters/slurm.sh config.yaml`.
# Not run on a SLURM cluster yet. The project must be installed on a folder that all hosts share.
#SBATCH --job-name=rlhf
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@300
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
port=6379

srun --nodes=1 --ntasks=1 -w "$head" \
  ray start --head --node-ip-address="$address" --port=$port --num-gpus=8 --block &
sleep 20
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
    ray start --address="$address:$port" --num-gpus=8 --block &
  sleep 20
fi

# Ends in good order five minutes before the job's time is over, with a checkpoint; the next job continues from it.
export RAY_ADDRESS="$address:$port"
resume=""
[ -d "${RLHF_OUTPUT:-runs/rlhf}/checkpoints" ] && resume="--resume"
rlhf train "$1" output="${RLHF_OUTPUT:-runs/rlhf}" $resume &
run=$!
trap 'kill -TERM $run' TERM
wait $run || wait $run
