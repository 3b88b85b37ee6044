"""Trains Megatron's arguments in one process: ``python recipe_training.py CASES.json FOLDER``.

Megatron's own loop trains each case, without the flags of chunk graphs and with them.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hybrid_ep_stand_in import hybrid_ep

from chunkgraph.jobs.processes import die_with_parent
from chunkgraph.launch.hooks import ChunkGraphsInPretrain, enable
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.cpu.pretrain import cpu_flags, cpu_pretrain_host
from chunkgraph.megatron.features.experts.state import forget_expert_metrics

SCRIPTS = Path(__file__).parents[2] / "scripts"
CHUNK = ["--cuda-graph-granularity", "chunk"]


class Trainings:
    """Trainings of this process, one after the other, with the pretrain script's functions.

    Args:
        hooks: Hooks in Megatron's pretrain program.
        log: Path of the exact losses and gradient norms, without its suffix.
    """

    def __init__(self, hooks: ChunkGraphsInPretrain, log: Path) -> None:
        sys.path.insert(0, str(SCRIPTS))
        self._script: Any = importlib.import_module("pretrain_gpt")
        self._training = import_megatron("megatron.training.training")
        self._hooks = hooks
        self._log = log.with_suffix(".rank0")
        self._replays = 0
        self._script.log_exactly(str(log))
        before_log = hooks.before_log

        def count_replays(iteration: int) -> None:
            before_log(iteration)
            self._replays = hooks.graphs.counters.replays if hooks.graphs is not None else 0

        hooks.before_log = count_replays  # type: ignore[method-assign]

    def run(self, flags: list[str]) -> tuple[list[str], int]:
        """Train; return each step's gradient norm and losses, and the number of replays."""
        sys.argv = ["pretrain_gpt.py", *flags, *cpu_flags(flags)]
        self._log.unlink(missing_ok=True)
        rerun = import_megatron("megatron.core.rerun_state_machine")
        import_megatron("megatron.training.global_vars").unset_global_variables()
        rerun.destroy_rerun_state_machine()
        forget_expert_metrics()
        args = self._script.parse_and_validate_args()
        import_megatron("megatron.training.initialize").initialize_megatron()
        model, optimizer, scheduler = self._training.setup_model_and_optimizer(
            self._script.ModelType.encoder_or_decoder, self._script.model_provider
        )
        config = import_megatron("megatron.core.utils").get_model_config(model[0])
        data = rerun.RerunDataIterator(_batches(args))
        step = self._script.forward_step
        self._training.train(step, model, optimizer, scheduler, data, None, None, config, {}, None)
        return self._log.read_text(encoding="utf-8").splitlines(), self._replays


def _batches(args: Any) -> Iterator[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(args.seed)
    rows, length = args.micro_batch_size, args.seq_length
    hidden = torch.ones(length, length).triu(1).bool()
    while True:
        text = torch.randint(args.padded_vocab_size, (rows, length + 1), generator=random)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(length).expand(rows, -1).contiguous(),
            "loss_mask": torch.ones(rows, length),
            "attention_mask": hidden.expand(rows, 1, -1, -1),
        }


@contextmanager
def plain_kernels(flags: list[str], hooks: ChunkGraphsInPretrain) -> Iterator[None]:
    """Replace what Transformer Engine and HybridEP compute for these flags by plain operators."""
    user_specs = importlib.import_module("user_specs")
    provider = import_megatron("megatron.core.models.backends").LocalSpecProvider
    is_fused = "--use-transformer-engine-op-fuser" in flags
    replaced = {
        (provider, "grouped_mlp_modules"): (
            user_specs.fused_modules if is_fused else user_specs.grouped_modules
        ),
        (user_specs.FusedExperts, "_is_fused_impl_supported"): lambda _: True,
    }
    if "--multi-latent-attention" in flags:
        replaced[provider, "core_attention"] = lambda _: user_specs.LatentCore
    if "hybridep" in flags:
        replaced[hooks, "_on_cpu"] = False
    with ExitStack() as stack:
        for (target, name), value in replaced.items():
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.enter_context(hybrid_ep(is_on="hybridep" in flags))
        yield


def main(cases_path: str, folder: str) -> None:
    """Train every case; write the results of all to ``results.json``."""
    die_with_parent()
    logging.disable(logging.WARNING)
    cases = json.loads(Path(cases_path).read_text(encoding="utf-8"))
    results: dict[str, Any] = {}
    with cpu_pretrain_host():
        hooks = enable(on_cpu=True)
        trainings = Trainings(hooks, Path(folder) / "exact")
        for name, flags in cases.items():
            with plain_kernels(flags, hooks):
                eager, _ = trainings.run(flags)
                graphs, replays = trainings.run([*flags, *CHUNK])
            results[name] = {"eager": eager, "graphs": graphs, "replays": replays}
    (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
