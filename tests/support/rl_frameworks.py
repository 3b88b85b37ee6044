"""A case of `run_cases`: cycles of loops that call Megatron as verl, NeMo-RL and slime do.

Stand-ins of the frameworks' modules have what the integrations replace, and pack their batches as
the frameworks do. In the oracle the framework has no graphs and pads rows to whole buckets itself;
with graphs it does not pad them. Each cycle computes log-probabilities, those of a reference, and
trains twice, and the framework gives memory back after each of these.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from extended_config import extended
from gathering import of_ranks
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from chunkgraph.megatron.features.packing.bank import PackingOptions
from chunkgraph.packing import PackedShape
from chunkgraph.trainer.model import build_model, zero_gradients
from chunkgraph.trainer.trained_model import TrainedModel

BUCKET, MOST_ROWS = 32, 96
_OPTIONS = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}


def samples_of(cycle: int) -> list[torch.Tensor]:
    """Draw the samples of a cycle; one of the fourth fits no bucket."""
    generator = torch.Generator().manual_seed(cycle)
    lengths = torch.randint(3, 40, (4 + 2 * (cycle % 3),), generator=generator).tolist()
    lengths[1] += MOST_ROWS * (cycle == 3)
    return [torch.randint(1, 64, (n,), generator=generator) for n in lengths]


def bins_of(samples: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the samples of each microbatch, by first fit."""
    bins: list[list[int]] = []
    for index, sample in enumerate(samples):
        room = (b for b in bins if sum(len(samples[i]) for i in b) + len(sample) <= MOST_ROWS)
        if (found := next(room, None)) is None:
            bins.append(found := [])
        found.append(index)
    return bins


def packed(
    samples: Sequence[torch.Tensor], multiple: int, *, grows: bool, padded_offsets: bool = True
) -> tuple[torch.Tensor, Any]:
    """Return the row of a microbatch, and its parameters.

    Args:
        samples: Tokens of each document.
        multiple: Rows are padded to a multiple of this number.
        grows: Whether the last document grows by the padding; else it is one more document.
        padded_offsets: Whether parameters have padded offsets as well.
    """
    ids = torch.cat([*samples])
    ends = [0, *torch.tensor([len(s) for s in samples]).cumsum(0).tolist()]
    if padding := -len(ids) % multiple:
        ids = torch.nn.functional.pad(ids, (0, padding))
        ends = [*(ends[:-1] if grows else ends), len(ids)]
    offsets = torch.tensor(ends, dtype=torch.int32)
    longest = int(offsets.diff().max())
    padded = offsets if padded_offsets else None
    params = PackedSeqParams("thd", *[offsets] * 2, *[padded] * 2, longest, longest)
    return ids.unsqueeze(0), params


class Verl:
    """Engines have a model each; microbatches are nested, also as the input of later stages."""

    has_own_reference = True
    name = "verl"

    def __init__(self) -> None:
        self.steps = module("verl.workers.engine.megatron.transformer_impl")
        members = {"enable_routing_replay": False, "to": lambda *_, **__: None, "step": verl_step}
        engine = type("MegatronEngine", (), members)
        self.steps.MegatronEngine = engine
        module("verl.models.mcore.util").preprocess_thd_engine = preprocess_thd_engine
        self._engines: dict[Any, Any] = {}

    def run(self, chunk: Any, samples: Any, after: Any, multiple: int, **options: Any) -> Any:
        engine = self._engines.setdefault(chunk, self.steps.MegatronEngine())
        padding = {"pad_to_length": multiple > 1, "pad_to_length_bucket": multiple}
        engine.engine_config = SimpleNamespace(use_remove_padding=True, **padding)
        engine.module = [chunk]
        nested = [
            {"input_ids": torch.nested.as_nested_tensor([*own], layout=torch.jagged)}
            for own in samples
        ]
        return self.steps.get_forward_backward_func()(
            forward_step_func=partial(engine.step, after=after),
            data_iterator=iter(nested),
            model=engine.module,
            num_microbatches=len(nested),
            seq_length=1,
            micro_batch_size=1,
            **options,
        )

    def end_phase(self, chunk: Any) -> None:
        self._engines[chunk].to("cpu", model=False, optimizer=False, grad=False)


def preprocess_thd_engine(
    nested: torch.Tensor,
    pre_process: bool = True,
    use_fp8_padding: bool = False,
    pad_to_length_bucket: int | None = None,
) -> tuple[torch.Tensor, Any, None]:
    assert not use_fp8_padding
    ids, params = packed(nested.unbind(), pad_to_length_bucket or 1, grows=True)
    return ids if pre_process else nested, params, None


def verl_step(engine: Any, batches: Iterator[Any], chunk: Any, after: Any) -> Any:
    nested, settings = next(batches)["input_ids"], engine.engine_config
    pack = partial(
        sys.modules["verl.models.mcore.util"].preprocess_thd_engine,
        nested,
        pad_to_length_bucket=settings.pad_to_length_bucket if settings.pad_to_length else None,
    )
    ids, params, _ = pack(pre_process=unwrap_model(chunk).pre_process)
    logits = chunk(input_ids=ids, attention_mask=None, position_ids=None, packed_seq_params=params)
    return logits, partial(after, nested.unbind(), pack()[0])


class NemoRL:
    """One model, which is no list and exchanges no shapes: all rows of a step are its longest."""

    has_own_reference = False
    name = "nemo_rl"

    def __init__(self) -> None:
        self.steps = module("nemo_rl.models.megatron.train")
        worker = type("MegatronPolicyWorkerImpl", (), {"offload_before_refit": lambda _: None})
        module(
            "nemo_rl.models.policy.workers.megatron_policy_worker"
        ).MegatronPolicyWorkerImpl = worker
        self._worker = worker()

    def run(self, chunk: Any, samples: Any, after: Any, multiple: int, **options: Any) -> Any:
        longest = max(sum(map(len, own)) for own in samples)
        num_rows = -(-longest // multiple) * multiple

        def batches() -> Iterator[Any]:
            for own in samples:
                ids, params = packed(own, num_rows, grows=True)
                yield SimpleNamespace(input_ids=ids, packed_seq_params=params, samples=own)

        def forward_step(data: Iterator[Any], chunk: Any, *, use_router_replay: bool) -> Any:
            assert not use_router_replay
            batch = next(data)
            logits = chunk(
                input_ids=batch.input_ids,
                position_ids=None,
                attention_mask=None,
                packed_seq_params=batch.packed_seq_params,
            )
            return logits, partial(after, batch.samples, batch.input_ids)

        return self.steps.get_forward_backward_func()(
            forward_step_func=partial(forward_step, use_router_replay=False),
            data_iterator=batches(),
            model=chunk,
            num_microbatches=len(samples),
            seq_length=num_rows,
            micro_batch_size=1,
            decoder_seq_length=num_rows,
            **options,
        )

    def end_phase(self, chunk: Any) -> None:
        self._worker.offload_before_refit()


class Slime:
    """One model; forward steps pack samples that they take from an iterator by an offset."""

    has_own_reference = False
    name = "slime"

    def __init__(self) -> None:
        self.steps = module("slime.backends.megatron_utils.model")
        self._saver = SimpleNamespace(pause=lambda: None)
        module("slime.backends.megatron_utils.actor").torch_memory_saver = self._saver

    def run(self, chunk: Any, samples: Any, after: Any, multiple: int, **options: Any) -> Any:
        flat = [one for own in samples for one in own]
        indices = iter(range(len(flat)))
        data = SimpleNamespace(
            rollout_data={"tokens": flat},
            micro_batch_indices=[[next(indices) for _ in own] for own in samples],
            offset=0,
        )

        def forward_step(data: Any, chunk: Any) -> Any:
            own = [flat[i] for i in data.micro_batch_indices[data.offset]]
            data.offset += 1
            ids, params = packed(own, multiple, grows=False, padded_offsets=False)
            logits = chunk(
                input_ids=ids,
                position_ids=None,
                attention_mask=None,
                labels=None,
                packed_seq_params=params,
                loss_mask=torch.ones_like(ids),
            )
            return logits, partial(after, own, ids)

        decoder = {} if options["forward_only"] else {"decoder_seq_length": 64}
        return self.steps.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[data],
            model=[chunk],
            num_microbatches=len(samples),
            seq_length=64,
            micro_batch_size=1,
            **decoder,
            **options,
        )

    def end_phase(self, chunk: Any) -> None:
        self._saver.pause()


_FRAMEWORKS: dict[str, Any] = {kind.name: kind for kind in (Verl, NemoRL, Slime)}


def module(name: str) -> Any:
    """Register a stand-in of a module."""
    sys.modules[name] = stand_in = ModuleType(name)
    stand_in.get_forward_backward_func = get_forward_backward_func  # type: ignore[attr-defined]
    return stand_in


class Loop:
    """The cycles of one run."""

    _scale: ClassVar[float] = 0.9

    def __init__(self, case: dict[str, Any], device: torch.device, multiple: int) -> None:
        self.framework = framework = _FRAMEWORKS[case["framework"]]()
        options = {**_OPTIONS, "variable_seq_lengths": framework.name != "nemo_rl"}
        with extended(case["config"]) as config:
            self.model = TrainedModel(config, device, transformer_options=options)
        (self.chunk,) = self.model.chunks
        self.reference = self.chunk
        if framework.has_own_reference:
            train = {**case["config"]["train"], "use_ddp": False}
            with extended({**case["config"], "train": train}) as config:
                (self.reference,) = build_model(config, device, transformer_options=options)
        self.results: list[torch.Tensor] = []
        self.graphs: dict[Any, Any] = {}
        self.num_asleep = 0
        self._multiple = multiple

    def run_pass(self, chunk: Any, samples: list[torch.Tensor], *, forward_only: bool) -> None:
        """Run one call of the schedule."""
        chunk.train(not forward_only)
        packs = [[samples[i] for i in own] for own in bins_of(samples)]
        multiple = self._multiple if max(map(len, samples)) <= MOST_ROWS else 1
        with torch.set_grad_enabled(not forward_only):
            outputs = self.framework.run(
                chunk, packs, self.after, multiple, forward_only=forward_only
            )
        self.results += [value for output in outputs for value in output]

    def after(self, samples: Any, ids: torch.Tensor, logits: torch.Tensor) -> Any:
        """Return a loss and log-probabilities; divide logits in place."""
        logits.div_(self._scale)
        labels = ids.roll(-1, 1).unsqueeze(-1)
        values = logits.float().log_softmax(-1).gather(-1, labels).squeeze(-1)[0]
        lengths = [len(s) for s in samples]
        own = [v[:-1] for v in values[: sum(lengths)].split(lengths)]
        return -torch.cat(own).mean(), [v.detach() for v in own]

    def end_phase(self, chunk: Any) -> None:
        """Let the framework give memory back."""
        self.framework.end_phase(chunk)
        self.num_asleep += chunk in self.graphs and self.graphs[chunk].is_asleep

    def cycle(self, number: int) -> None:
        """Compute log-probabilities twice, and train on two mini-batches."""
        samples = samples_of(number)
        self.run_pass(self.chunk, samples, forward_only=True)
        self.end_phase(self.chunk)
        parameters = [*self.chunk.parameters()]
        kept = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters if self.reference is self.chunk else ():
                p.mul_(0.5)  # another model's weights
            self.run_pass(self.reference, samples, forward_only=True)
            for p, own in zip(parameters, kept, strict=True):
                p.copy_(own)
        self.end_phase(self.reference)
        for half in (samples[::2], samples[1::2]):
            zero_gradients([self.chunk], self.model.optimizer)
            self.run_pass(self.chunk, half, forward_only=False)
            self.model.optimizer.step()
        self.end_phase(self.chunk)


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Return whether both runs are equal, and what the graphs did, of every rank."""
    runs: list[list[torch.Tensor]] = []
    found: dict[str, Any] = {}
    for has_graphs in (False, True):
        with mock.patch.dict(sys.modules):
            loop = Loop(case, device, 1 if has_graphs else BUCKET)
            if has_graphs:
                shape = PackedShape(12, MOST_ROWS)
                packing = PackingOptions(shape, buckets=[BUCKET, 2 * BUCKET], seq_buckets=())
                args = SimpleNamespace(
                    allgather_cp=False,
                    use_routing_replay=False,
                    tensor_model_parallel_size=1,
                    context_parallel_size=1,
                    data_pad_size_multiplier=1,
                )
                install = importlib.import_module(f"chunkgraph.integrations.{case['framework']}")
                first = [args] if case["framework"] == "slime" else []
                loop.graphs = install.install(*first, packing).graphs
            for number in range(case["num_cycles"]):
                loop.cycle(number)
        runs.append([*loop.results, *(p.detach().clone() for p in loop.chunk.parameters())])
        for chunk, graphs in loop.graphs.items():
            engine, forwards = graphs.engine, graphs.engine.forward_only
            found["policy" if chunk is loop.chunk else "reference"] = {
                "sessions": engine.counters.capture_sessions,
                "replayed": engine.counters.replayed_steps,
                "fallbacks": dict(engine.counters.fallbacks),
                "forward_sessions": forwards.counters.capture_sessions,
                "forward_replayed": forwards.counters.replayed_steps,
                "eager_calls": forwards.num_eager_calls,
            }
            graphs.detach()
        loop.model.close()
    pairs = enumerate(zip(*runs, strict=True))
    found["different"] = [i for i, (a, b) in pairs if not torch.equal(a, b)]
    return {"ranks": of_ranks({**found, "asleep": loop.num_asleep})}
