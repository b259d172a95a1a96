import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import faults
import pytest
import torch
import torch.distributed as dist
from together import run_together
from torch.profiler import ProfilerActivity, profile

from model import GPT, AttentionConfig, ModelConfig
from tests.test_config import composed
from train.build import build_step_model
from train.config import Config, parse
from train.context_parallel import ContextGroups
from train.distributed import Processes, join_processes
from train.optim import build_optimizer
from train.parallel import gather, set_gradient_sync, shard, whole
from train.passes import Passes
from train.step import forward_backward, update
from train.weights import load_model


def small(recompute: str = "none", n_embd: int = 32) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=n_embd, vocab_size=100, max_seq_len=8, dropout=0.0)
    return GPT(config, AttentionConfig(implementation="sdpa"), recompute=recompute)


def test_unsharded_weights_are_returned_as_they_are():
    weights = small()
    set_gradient_sync(weights, False)
    assert gather(weights, small, is_main=True) is weights
    assert whole(weights.token_embedding.weight) is weights.token_embedding.weight


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="distributed must be one of ddp, fsdp, got 'zero'"):
        parse(composed("distributed=zero"))
    assert parse(composed("distributed=fsdp")).distributed == "fsdp"


def test_a_group_for_shards_needs_shards_and_divides_the_processes():
    with pytest.raises(
        ValueError, match="shard_processes=2 must be at least 2, and needs distributed=fsdp, go"
    ):
        parse(composed("shard_processes=2"))
    with pytest.raises(ValueError, match="shard_processes=4 must divide the 6 processes: start a multiple"):
        parse(composed("distributed=fsdp", "shard_processes=4")).check_processes(6)


@pytest.mark.parametrize(("shard_processes", "shape"), [(2, (4, 2)), (4, (2, 4)), (8, (8,)), (None, (8,))])
def test_neighbouring_processes_share_one_copy_of_the_weights_on_their_own_device(shard_processes, shape):
    processes = Processes(0, 8, torch.device("cpu"), None, None)
    with (
        patch("train.parallel.init_device_mesh", lambda device, shape, mesh_dim_names: (device, shape)),
        patch("torch.distributed.fsdp.fully_shard") as sharded,
    ):
        shard(small(), processes, shard_processes, compiled=False, reshard_after_forward=True)
    # the last dimension, over which the weights are split, counts neighbours; without a mesh FSDP would take
    # the GPU of a machine that has one
    assert [call.kwargs["mesh"] for call in sharded.call_args_list] == [("cpu", shape)] * 3


def test_only_shards_are_gathered_once_a_step():
    with pytest.raises(ValueError, match="reshard_after_forward=false needs distributed=fsdp, got ddp"):
        parse(composed("reshard_after_forward=false"))
    assert not parse(composed("reshard_after_forward=false", "distributed=fsdp")).reshard_after_forward


def test_processes_that_share_a_sequence_divide_all_of_them():
    config = parse(composed("context_parallel=4"))
    with pytest.raises(ValueError, match="context_parallel=4 must divide the 6 processes"):
        config.check_processes(6)
    config.check_processes(8)


NO_SCALE = torch.amp.GradScaler("cpu", enabled=False)


def train(
    config: Config,
    processes: Processes,
    *,
    steps: int = 2,
    watch=nullcontext,
    scaler=NO_SCALE,
    overflow: int = -1,
) -> dict:
    """Weights and norms after some steps of two micro-batches on this process' part of eight sequences.

    overflow: in this step one gradient of the second shard, on every process that holds it, is infinite.
    """
    weights = small(config.recompute)
    if config.distributed == "fsdp" and processes.world_size > 1:
        reshards = config.reshard_after_forward
        shard(weights, processes, config.shard_processes, compiled=False, reshard_after_forward=reshards)
    optimizer = build_optimizer(weights, config.optim)
    context = ContextGroups(processes.rank, processes.world_size, None)
    model = build_step_model(weights, config, processes, context)
    passes = Passes(model, 2, nullcontext, scaler)
    text = torch.randint(100, (8, 9), generator=torch.Generator().manual_seed(1))
    text = text.unflatten(0, (2, processes.world_size, -1))[:, processes.rank].flatten(0, 1)
    norms = []
    for step in range(steps):
        with watch():
            forward_backward(passes, text[:, :-1], text[:, 1:], processes)
        if step == overflow and processes.rank % (config.shard_processes or processes.world_size) == 1:
            weights.blocks[0].mlp.expand.weight.grad.to_local()[0, 0] = float("inf")
        # far below the norm: the clipping shows
        norms.append(update(optimizer, scaler, 1e-2, 0.1, float("inf")))
    tensors = {name: whole(value) for name, value in weights.state_dict().items()}
    return {"weights": tensors, "norms": torch.stack(norms)}


def steps_are_those_of_one_process(rank: int, folder: Path) -> None:
    alone = Processes(0, 1, torch.device("cpu"), None, None)
    together = Processes(rank, 4, torch.device("cpu"), None, None)
    base = ["compile=false", "device=cpu"]
    for optim in ("adamw", "muon"):
        expected = train(parse(composed(*base, f"optim={optim}")), alone)
        for given in (
            ["distributed=ddp", "recompute=selective"],
            ["distributed=fsdp", "recompute=full"],
            ["distributed=fsdp", "shard_processes=2"],
            ["distributed=fsdp", "reshard_after_forward=false"],
        ):
            found = train(parse(composed(*base, f"optim={optim}", *given)), together)
            torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-3, atol=0)
            for name, value in expected["weights"].items():
                # the keys' bias has no gradient but rounding, which Adam makes a whole step
                if not name.endswith("qkv.bias"):
                    torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-3, msg=name)


def test_steps_on_four_processes_are_those_of_one_under_ddp_fsdp_and_hybrid_shards_and_recomputation(
    tmp_path,
):
    run_together(steps_are_those_of_one_process, 4, tmp_path / "meeting", tmp_path)


def an_overflow_is_skipped(rank: int) -> None:
    together = Processes(rank, 4, torch.device("cpu"), None, None)
    for given in (["optim=adamw"], ["optim=muon", "shard_processes=2"]):
        config = parse(composed("precision=fp16", "distributed=fsdp", *given))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = train(config, together, scaler=scaler, overflow=0)
        assert found["norms"][0].isinf()
        assert found["norms"][1].isfinite()
        assert scaler.get_scale() == 512.0
        expected = train(config, together, steps=1)
        for name, value in expected["weights"].items():
            # powers of two leave no trace
            assert torch.equal(found["weights"][name], value), name
            dist.broadcast(value, 0)
            assert torch.equal(found["weights"][name], value), name


def test_an_overflow_in_one_shard_skips_the_step_and_halves_the_scale_on_every_process(tmp_path):
    run_together(an_overflow_is_skipped, 4, tmp_path / "meeting")


def gradients_travel_once_a_step(rank: int) -> None:
    together = Processes(rank, 2, torch.device("cpu"), None, None)
    gather, scatter = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
    # all weights fit one bucket of DDP, and the loss travels too; two blocks and what is outside of them,
    # which FSDP2 gathers once a micro-batch, and the blocks twice
    for given, expected in (
        (["distributed=ddp"], {"c10d::allreduce_": 2}),
        (["distributed=fsdp"], {scatter: 3, gather: 2 * (1 + 2 * 2)}),
        (["distributed=fsdp", "reshard_after_forward=false"], {scatter: 3, gather: 3}),
    ):
        config = parse(composed("compile=false", "device=cpu", *given))
        profiler = profile(activities=[ProfilerActivity.CPU])
        train(config, together, steps=1, watch=lambda profiler=profiler: profiler)
        calls = {event.key: event.count for event in profiler.key_averages()}
        assert {key: calls[key] for key in expected} == expected, given


def test_gradients_travel_once_a_step_however_many_micro_batches_it_has_and_weights_where_they_stay(tmp_path):
    run_together(gradients_travel_once_a_step, 2, tmp_path / "meeting")


def a_graph_is_cut_for_traveling_gradients(rank: int) -> None:
    together = Processes(rank, 2, torch.device("cpu"), None, None)
    context = ContextGroups(rank, 2, None)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    for accumulation, n_graphs in ((2, 1), (1, 2)):
        torch._dynamo.reset()
        graphs.clear()
        tokens_per_step = f"tokens_per_step={2 * 1024 * accumulation}"
        config = parse(composed("device=cpu", "tokens_per_microbatch=1024", tokens_per_step, "seq_len=1024"))
        with patch.object(torch, "compile", partial(torch.compile, backend=count)):
            # more than the megabyte of DDP's first bucket
            model = build_step_model(small(n_embd=256), config, together, context)
            model(tokens, tokens).backward()
        assert len(graphs) == n_graphs, accumulation


def test_a_compiled_graph_is_cut_for_traveling_gradients_only_where_each_micro_batch_sends_them(tmp_path):
    run_together(a_graph_is_cut_for_traveling_gradients, 2, tmp_path / "meeting")


def test_hybrid_shards_with_muon_resume_bit_for_bit_and_on_other_shards_and_gathered_once_a_step(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    given = ["optim=muon", "distributed=fsdp", "optim.final_learning_rate_ratio=1.0", "model.dropout=0.0"]
    hybrid = [*given, "shard_processes=2"]
    try:
        faults.complete(faults.small_config("whole", 10, *hybrid), 4)
        faults.complete(faults.small_config("parts", 5, *hybrid), 4)
        faults.complete(faults.small_config("parts", 10, *hybrid), 4)
        for steps in (5, 10):
            faults.complete(faults.small_config("kept", steps, *hybrid, "reshard_after_forward=false"), 4)
        # another run's checkpoint, on two processes that share one copy
        start = f"checkpoint.resume={tmp_path}/runs/whole/checkpoints/step_00000005"
        faults.complete(faults.small_config("other", 10, *given, start), 2)
    finally:
        faults.Attempt.kill_all()
    attention = AttentionConfig(implementation="sdpa")
    names = ("whole", "parts", "kept", "other")
    whole, parts, kept, other = (load_model(f"runs/{name}", attention).state_dict() for name in names)
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name
        assert torch.equal(kept[name], value), name
        # the products of Muon round to bf16
        torch.testing.assert_close(other[name], value, rtol=0.05, atol=2e-3, msg=name)


def test_more_processes_than_gpus_are_refused_by_each_of_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for key, value in (("LOCAL_WORLD_SIZE", "8"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "0"), ("RANK", "0")):
        monkeypatch.setenv(key, value)
    message = "8 processes on a host with 4 GPUs: use --nproc-per-node=4"
    with pytest.raises(ValueError, match=message), join_processes("cuda"):
        pass


def test_a_process_without_a_gpu_is_told_so():
    message = "device=cuda, but torch sees no GPU: use device=cpu"
    with pytest.raises(ValueError, match=message), join_processes("cuda"):
        pass


ALLOCATE = """
import torch
from train.distributed import join_processes
with join_processes("cuda") as processes:
    torch.empty(2**22, device=processes.device)
    print({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("own", "expandable"),
    [
        ({}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, False),
    ],
)
def test_memory_grows_in_one_piece_unless_the_user_set_the_allocator_up(own, expandable):
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    command = [sys.executable, "-c", ALLOCATE]
    done = subprocess.run(command, env=inherited | own, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{{{expandable}}}"]
