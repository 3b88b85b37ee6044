"""The flags that `--cuda-graph-granularity chunk` brings to Megatron's command line.

No torch here: the launcher looks at them before any process is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from chunkgraph.errors import ConfigError
from chunkgraph.launch.context_flags import (
    CONTEXTS,
    ContextSizes,
    add_context_flags,
    contexts_from,
    given_context_flags,
)
from chunkgraph.launch.stash_flags import STASH, add_stash_flags, given_stash_flags, stash_from
from chunkgraph.settings import StashConfig

if TYPE_CHECKING:
    from chunkgraph.engine import CaptureOptions

__all__ = [
    "COUNTS",
    "FLAGS",
    "PACKING",
    "GraphFlags",
    "add_flags",
    "check_flag_values",
    "flags_from",
    "read_flags",
]

_GROUP = "chunk-wise CUDA graphs"


@dataclass(frozen=True)
class _Flag:
    """One flag; ``choices[0]`` is what it means where it is not given."""

    name: str
    choices: tuple[str, ...]
    help: str

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class _Count:
    """A flag that takes a number, or several if it ``is_list``.

    ``bare`` is what it means without one, if it may be so; ``least`` what it is at least, in words.
    """

    name: str
    help: str
    bare: int | None = None
    is_list: bool = False
    kind: type = int
    least: str = "1 or more tokens"

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


_GRANULARITY = _Flag(
    "--cuda-graph-granularity",
    ("layer", "chunk"),
    "What one CUDA graph holds. layer: what --cuda-graph-impl says, as without this flag. chunk: a "
    "whole model chunk, captured once for each slot and replayed for any number of microbatches.",
)
_OPTIONS = (
    _Flag(
        "--cuda-graph-chunk-scope",
        ("auto", "block", "chunk"),
        "block: the transformer block. chunk: also embedding, output layer and loss. auto: chunk "
        "where it can be captured, else block; the first line of the run says which, and why.",
    ),
    _Flag(
        "--cuda-graph-memory-plan",
        ("shared_backward", "shared_temporaries", "pool_per_slot"),
        "Memory of the graphs: all backwards in one pool; what forwards need for a moment there as "
        "well; or a pool for each slot.",
    ),
    _Flag(
        "--cuda-graph-shared-slots",
        ("no", "yes"),
        "yes: the model chunks of a rank share its slots. Less memory in interleaved schedules, "
        "for graphs of every chunk in every slot.",
    ),
    _Flag(
        "--cuda-graph-memset-kernels",
        ("yes", "no"),
        "yes: small memsets inside the graphs run as kernels, for which the GPU waits less.",
    ),
    _Flag(
        "--cuda-graph-verify",
        ("none", "poison", "shadow"),
        "poison: fill freed slots and scratch with NaN around every replay (slow). shadow: compare "
        "replays with eager runs of the same inputs (slow).",
    ),
    _Flag(
        "--cuda-graph-on-failure",
        ("raise", "eager"),
        "After a capture that failed on any rank: raise the error, or train on eagerly.",
    ),
    _Flag(
        "--cuda-graph-token-drops",
        ("warn", "count", "raise", "rerun"),
        "Tokens that an expert has no room for, which Megatron drops: count them and warn once; "
        "count them; raise an error; or run the step anew with room for all, before the optimizer.",
    ),
)
COUNTS = (
    _Count(
        "--cuda-graph-num-verify-steps",
        "Replayed steps after the capture that --cuda-graph-verify checks (default: all).",
    ),
    _Count(
        "--cuda-graph-verify-every",
        "Of those, it checks every N-th (default: 1).",
    ),
)
SEQ_BUCKETS = "--cuda-graph-packed-seq-buckets"
PACKING = (
    _Count(
        "--cuda-graph-max-packed-seqs",
        "Sequences of a packed microbatch in a graph: its documents and one for the rest of its "
        "tokens. A step with more of them runs eagerly. 0: no packed sequences (default); without "
        "a number: 50.",
        bare=50,
    ),
    _Count(
        "--cuda-graph-max-packed-tokens",
        "Rows of such a microbatch (default: all that the data set makes, --seq-length). With "
        "fewer, rows at its end that no loss needs are left out.",
    ),
    _Count(
        "--cuda-graph-max-document-tokens",
        "Rows of the longest document in such a microbatch (default: all). A step with a longer "
        "one runs eagerly; kernels are told the limit, which makes cuDNN's attention no faster.",
    ),
    _Count(
        "--cuda-graph-packed-buckets",
        "Shorter microbatches that are captured too, as parts of those tokens or as numbers of "
        "tokens above 1; each microbatch takes the smallest that holds all rows that a loss needs.",
        is_list=True,
        kind=float,
        least="1 or more tokens, or parts of them above 0",
    ),
    _Count(
        SEQ_BUCKETS,
        "Fewer sequences that are captured too; each microbatch takes the fewest that hold its "
        "documents, since attention's time grows with all of them, empty or not. Default: powers "
        "of two from 64 to half of the most; 32 too where the shortest rows (of a rank) are at "
        "most 1024. 0: none.",
        is_list=True,
        least="2 or more sequences, or 0",
    ),
)
FLAGS = (_GRANULARITY, *_OPTIONS)
"""All flags. That of the warmup is Megatron's own ``--cuda-graph-warmup-steps``."""


@dataclass(frozen=True, kw_only=True)
class GraphFlags:
    """What the flags ask for when the granularity is ``chunk``.

    Attributes:
        scope: what of a model chunk is captured.
        memory_plan: where graphs keep their memory.
        shared_slots: whether the chunks of a rank share its slots.
        memset_kernels: whether small memsets inside the graphs run as kernels.
        verify: what is checked while training.
        num_verify_steps: replayed steps that are checked; None: all.
        verify_every: of those, every so many.
        on_failure: what follows a failed capture.
        token_drops: what is done about tokens that an expert has no room for.
        num_warmup_steps: eager steps before the capture, Megatron's ``--cuda-graph-warmup-steps``.
        max_packed_seqs: sequences of a packed microbatch; 0: none are packed.
        max_packed_tokens: its tokens; None: the sequence length.
        max_document_tokens: those of its longest document; None: all.
        packed_buckets: lengths of shorter ones that are captured too.
        packed_seq_buckets: fewer sequences that are captured too; None: not said.
        contexts: context-parallel sizes of packed microbatches; None: all have the model's.
        stash: of what experts save; None: no stash.
    """

    scope: Literal["auto", "block", "chunk"] = "auto"
    memory_plan: Literal["shared_temporaries", "shared_backward", "pool_per_slot"] = (
        "shared_backward"
    )
    shared_slots: bool = False
    memset_kernels: bool = True
    verify: Literal["none", "poison", "shadow"] = "none"
    num_verify_steps: int | None = None
    verify_every: int = 1
    on_failure: Literal["raise", "eager"] = "raise"
    token_drops: Literal["warn", "count", "raise", "rerun"] = "warn"
    num_warmup_steps: int = 1
    max_packed_seqs: int = 0
    max_packed_tokens: int | None = None
    max_document_tokens: int | None = None
    packed_buckets: tuple[float, ...] = ()
    packed_seq_buckets: tuple[int, ...] | None = None
    contexts: ContextSizes | None = None
    stash: StashConfig | None = None

    def capture_options(self) -> CaptureOptions:
        """How the engine is to capture."""
        from chunkgraph.engine import CaptureOptions

        return CaptureOptions(
            num_warmup_steps=self.num_warmup_steps,
            memory_plan=self.memory_plan,
            shared_slots=self.shared_slots,
            memset_kernels=self.memset_kernels,
            verify=self.verify,
            num_verify_steps=self.num_verify_steps,
            verify_every=self.verify_every,
            on_failure=self.on_failure,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the saved configuration."""
        return asdict(self)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to Megatron's parser.

    Raises:
        ConfigError: the parser has one of them already.
    """
    for flag in (*FLAGS, *COUNTS, *PACKING, *CONTEXTS, *STASH):
        if flag.name in parser._option_string_actions:
            raise ConfigError(
                f"This Megatron has a flag {flag.name} of its own. chunkgraph adds the same to "
                "Megatron releases without it; start the script without chunkgraph, or use "
                "megatron-core 0.16 to 0.19."
            )
    group = parser.add_argument_group(_GROUP)
    for flag in FLAGS:
        # None where it is not given, so that a flag without effect can be refused.
        group.add_argument(
            flag.name,
            choices=flag.choices,
            default=flag.choices[0] if flag is _GRANULARITY else None,
            help=f"{flag.help} (default: {flag.choices[0]})",
        )
    for count in (*COUNTS, *PACKING):
        more: dict[str, Any] = {} if count.bare is None else {"nargs": "?", "const": count.bare}
        more |= {"type": count.kind, **({"nargs": "+"} if count.is_list else {})}
        group.add_argument(count.name, default=None, metavar="N", help=count.help, **more)
    add_context_flags(group)
    add_stash_flags(group)


def flags_from(args: argparse.Namespace) -> GraphFlags | None:
    """Read the flags; None with granularity ``layer``, which changes nothing.

    Args:
        args: what Megatron's parser made, with the flags of `add_flags`.

    Raises:
        ConfigError: a flag that only ``chunk`` has a use for, or an impossible number of steps.
    """
    flags, wrong = read_flags(args)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return flags


def read_flags(args: argparse.Namespace) -> tuple[GraphFlags | None, list[str]]:
    """As `flags_from`, with what is wrong in sentences; wrong values are left out of the flags.

    Args:
        args: as for `flags_from`.
    """
    wrong: list[str] = []
    given = {flag: getattr(args, flag.dest) for flag in _OPTIONS}
    counts = {count: getattr(args, count.dest) for count in (*COUNTS, *PACKING)}
    if args.cuda_graph_granularity == "layer":
        idle = [f"{flag.name} {value}" for flag, value in given.items() if value is not None]
        idle += [f"{count.name} {_shown(n)}" for count, n in counts.items() if n is not None]
        idle += [*given_context_flags(args), *given_stash_flags(args)]
        if idle:
            wrong.append(
                f"{', '.join(idle)} has no effect with --cuda-graph-granularity layer. Add "
                "--cuda-graph-granularity chunk, or leave it out."
            )
        return None, wrong
    num_warmup_steps = getattr(args, "cuda_graph_warmup_steps", 1)
    if num_warmup_steps < 1:
        wrong.append(
            f"--cuda-graph-warmup-steps {num_warmup_steps}: chunks are captured from the inputs of "
            "an eager step, so that at least one must come before. Give 1 or more."
        )
    values: dict[str, Any] = {
        flag.dest.removeprefix("cuda_graph_").removeprefix("chunk_"): value or flag.choices[0]
        for flag, value in given.items()
    }
    for name in ("shared_slots", "memset_kernels"):
        values[name] = values[name] == "yes"
    values.update(_packing(counts, wrong))
    for name, read in (
        ("contexts", lambda: contexts_from(args, counts[PACKING[0]] or 0)),
        ("stash", lambda: stash_from(args)),
    ):
        try:
            values[name] = read()
        except ConfigError as error:
            wrong.append(str(error))
    for count in COUNTS:
        number = counts[count]
        if number is None:
            continue
        if number < 1:
            wrong.append(f"{count.name} {number}: give 1 or more steps, or leave it out.")
        elif values["verify"] == "none":
            wrong.append(
                f"{count.name} {number} has no effect without --cuda-graph-verify poison or shadow."
            )
        else:
            values[count.dest.removeprefix("cuda_graph_")] = number
    return GraphFlags(num_warmup_steps=max(num_warmup_steps, 1), **values), wrong


def _packing(counts: dict[_Count, Any], wrong: list[str]) -> dict[str, Any]:
    """What the flags of packed sequences ask for; what is wrong is added to ``wrong``."""
    seqs_flag, *others = PACKING
    seqs = counts[seqs_flag]
    found: dict[str, Any] = {}
    if seqs is not None and seqs != 0 and seqs < 2:
        wrong.append(
            f"{seqs_flag.name} {seqs}: one sequence is for the rest of the tokens, so give 2 or "
            "more, or 0 for no packed sequences."
        )
    elif seqs is not None:
        found["max_packed_seqs"] = seqs
    for flag in others:
        value = counts[flag]
        if value is None:
            continue
        is_none = flag.name == SEQ_BUCKETS and value == [0]
        if not seqs:
            wrong.append(
                f"{flag.name} {_shown(value)} has no effect without {seqs_flag.name}; add it, or "
                "leave this out."
            )
        elif not is_none and min(value if flag.is_list else [value]) <= 0:
            wrong.append(f"{flag.name} {_shown(value)}: give {flag.least}, or leave it out.")
        else:
            name = flag.dest.removeprefix("cuda_graph_")
            found[name] = () if is_none else tuple(value) if flag.is_list else value
    return found


def _shown(value: Any) -> str:
    """As it stands on a command line."""
    return " ".join(f"{v:g}" for v in value) if isinstance(value, (list, tuple)) else str(value)


def check_flag_values(script_args: Sequence[str]) -> None:
    """Find a wrong value of one of the flags before a process is started.

    Raises:
        ConfigError: naming flags, values and choices.
    """
    every = {flag.name: flag.choices for flag in (*FLAGS, *CONTEXTS, *STASH) if flag.choices}
    wrong: list[str] = []
    for i, arg in enumerate(script_args):
        name, equals, value = arg.partition("=")
        if name not in every:
            continue
        if not equals:
            value = (list(script_args[i + 1 :]) or [""])[0]
        if value not in every[name]:
            expected = f"expected one of {', '.join(every[name])}."
            wrong.append(f"{f'{name} {value}'.rstrip()}: {expected}")
    if wrong:
        raise ConfigError("\n".join(wrong))
