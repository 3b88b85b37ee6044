"""One rank of GRPO cycles by verl's own Megatron engine: ``python verl_loop.py CASE.json``.

verl's bridges to checkpoints are not installed, so actor and reference are built here and given to
engines. All else is verl's: contexts, microbatches, packing, forward step, log-probabilities and
the calls of its worker in their order. The oracle is verl alone, which pads rows itself.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from extended_config import extended
from gathering import of_ranks
from megatron.core import parallel_state

from chunkgraph.integrations import verl as integration
from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.packing import PackedShape
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import training_process
from chunkgraph.trainer.trained_model import TrainedModel

BUCKET, MOST_ROWS, VOCABULARY = 32, 96, 64
OPTIONS = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}


class Settings(SimpleNamespace):
    """A configuration whose other settings are off."""

    def __getattr__(self, name: str) -> Any:
        return False


def engine_of(chunks: list[Any], optimizer: Any, *, pads: bool, offloads: bool) -> Any:
    """Return verl's engine for a model that is built already."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine: Any = object.__new__(MegatronEngineWithLMHead)
    engine.__dict__.update(
        module=chunks,
        optimizer=optimizer,
        tf_config=chunks[0].config,
        is_value_model=False,
        enable_routing_replay=False,
        _is_offload_param=offloads,
        _is_offload_optimizer=False,
        mode=None,
        engine_config=Settings(
            context_parallel_size=1,
            use_remove_padding=True,
            pad_to_length=pads,
            pad_to_length_bucket=BUCKET,
            router_replay=Settings(mode="disabled"),
        ),
        model_config=Settings(
            hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]),
            mtp=Settings(),
            tokenizer=Settings(pad_token_id=0),
        ),
    )
    return engine


def samples_of(cycle: int) -> list[torch.Tensor]:
    """Draw this replica's samples of a cycle."""
    seed = 100 * cycle + parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 40, (4 + 2 * (cycle % 3),), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in lengths]


def batch_of(samples: list[torch.Tensor], **of_samples: list[torch.Tensor]) -> Any:
    """Return samples as verl's worker passes them to an engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    fields = {
        "input_ids": samples,
        # verl's log-probability of a last token depends on what lies behind it.
        "loss_mask": [torch.ones(len(s)).index_fill(0, torch.tensor(-1), 0.0) for s in samples],
        **of_samples,
    }
    nested = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in fields.items()
    }
    batch = TensorDict(nested, batch_size=[len(samples)])
    tensordict_utils.assign_non_tensor(
        batch, use_dynamic_bsz=True, max_token_len_per_gpu=MOST_ROWS, temperature=0.9
    )
    return batch


def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Return a policy loss against the old log-probabilities, and one against the reference."""
    new = model_output["log_probs"].values()
    old, reference = data["old"].values(), data["reference"].values()
    losses = 0.1 * (new - reference).square() - 0.5 * (new - old).exp()
    is_counted = data["loss_mask"].values() > 0
    return losses.masked_fill(~is_counted, 0.0).sum() / data["batch_num_tokens"], {}


class Loop:
    """The cycles of one run; ``graphs`` are those of each model, by its chunk."""

    def __init__(
        self, case: dict[str, Any], device: torch.device, graphs: dict[Any, Any], *, pads: bool
    ) -> None:
        with extended(case["config"]) as config:
            model = TrainedModel(config, device, transformer_options=OPTIONS)
        with extended({**case["config"], "train": {**case["config"]["train"], "use_ddp": False}}):
            bare = build_model(config, device, transformer_options=OPTIONS)
        self.offloads = case["offloads"]
        self.actor = engine_of(model.chunks, model.optimizer, pads=pads, offloads=self.offloads)
        # On a CPU verl would free parameters that it has not copied; `end_phase` moves them.
        self.reference = engine_of(bare, None, pads=pads, offloads=False)
        if self.offloads:  # as when verl has built it
            self.actor.to("cpu", model=True, optimizer=False, grad=True)
        self.results: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []
        self.graphs = graphs
        self.num_asleep: Counter[Any] = Counter()

    def log_probs(self, engine: Any, samples: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the log-probabilities of samples; zeros on stages that have none."""
        with engine.eval_mode():
            outputs = engine.infer_batch(batch_of(samples))
        self.end_phase(engine)
        if not outputs:
            return [torch.zeros(len(s)) for s in samples]
        values = [v.detach() for v in outputs["model_output"]["log_probs"].unbind()]
        self.results += [value[:-1] for value in values]
        return values

    def cycle(self, number: int) -> None:
        """Compute log-probabilities, those of the reference, and train on two mini-batches."""
        samples = samples_of(number)
        old, reference = (self.log_probs(e, samples) for e in (self.actor, self.reference))
        with self.actor.train_mode():
            for part in (slice(0, None, 2), slice(1, None, 2)):
                batch = batch_of(samples[part], old=old[part], reference=reference[part])
                outputs = self.actor.train_batch(batch, loss)
                self.results += [torch.tensor(outputs["loss"])] if outputs else []
        self.end_phase(self.actor)

    def end_phase(self, engine: Any) -> None:
        """Let something else take memory that offloading gave back."""
        (chunk,) = engine.module
        if self.offloads and engine is self.reference:
            self._taken += [p.detach() for p in chunk.parameters()]
            for p in chunk.parameters():
                p.data = p.data.clone()
        elif self.offloads:
            for buffer in chunk.buffers:
                for tensor in (buffer.param_data, buffer.grad_data):
                    assert tensor.untyped_storage().size() == 0
                    self._taken.append(torch.empty(tensor.numel(), dtype=tensor.dtype))
        self.num_asleep[chunk] += chunk in self.graphs and self.graphs[chunk].is_asleep

    def run(self, num_cycles: int) -> list[torch.Tensor]:
        """Run cycles; return log-probabilities, losses and parameters."""
        for number in range(num_cycles):
            self.cycle(number)
        with self.actor.eval_mode():  # offloaded ones are back
            state = [p.detach().clone() for c in self.actor.module for p in c.parameters()]
        return [*self.results, *state]


def facts_of(loop: Loop, engine: Any) -> dict[str, Any]:
    """Return what the graphs of an engine did."""
    (chunk,) = engine.module
    graphs = loop.graphs[chunk]
    training, forwards = graphs.engine.counters, graphs.engine.forward_only
    return {
        "scope": graphs.scope.scope,
        "banks": sorted(graphs.replays_of_bank),
        "sessions": training.capture_sessions,
        "replayed": training.replayed_steps,
        "fallbacks": dict(training.fallbacks),
        "forward_sessions": forwards.counters.capture_sessions,
        "forward_replayed": forwards.counters.replayed_steps,
        "eager_calls": forwards.num_eager_calls,
        "asleep": loop.num_asleep[chunk],
    }


def main(path: str) -> None:
    """Run verl alone, with graphs, and with graphs that pad; rank 0 writes result.json."""
    case = json.loads(Path(path).read_text(encoding="utf-8"))
    with extended(case["config"]) as config, training_process(config) as device:
        from verl.workers.engine import base
        from verl.workers.engine.megatron import transformer_impl

        # On a CPU verl would mistake offloading for loading.
        for module in (base, transformer_impl):
            mock.patch.object(module, "get_device_name", return_value="cuda").start()
        expected = Loop(case, device, {}, pads=True).run(case["num_cycles"])
        shape = PackedShape(12, MOST_ROWS)
        packing = PackingOptions(shape, buckets=[BUCKET, 2 * BUCKET], seq_buckets=())
        models = integration.install(packing)
        runs: dict[str, Any] = {}
        for name, pads in (("padded by verl", True), ("padded by graphs", False)):
            loop = Loop(case, device, models.graphs, pads=pads)
            got = loop.run(case["num_cycles"])
            pairs = enumerate(zip(expected, got, strict=True))
            runs[name] = {
                "different": [i for i, (a, b) in pairs if not torch.equal(a, b)],
                "actor": facts_of(loop, loop.actor),
                "reference": facts_of(loop, loop.reference),
            }
        results = of_ranks({"num_compared": len(expected), "runs": runs})
        if dist.get_rank() == 0:
            Path(path).with_name("result.json").write_text(json.dumps(results), encoding="utf-8")
        for graphs in models.graphs.values():
            graphs.detach()


if __name__ == "__main__":
    main(sys.argv[1])
