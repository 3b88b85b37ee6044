"""Let all ranks agree: on maxima of numbers, on one error, on equal settings.

Ranks exchange nothing but element-wise maxima, now or ahead of time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.errors import ConfigError, WorkerError, describe_loss
from chunkgraph.jobs.processes import kill_stopped_ranks

Agree = Callable[[Sequence[int]], list[int]]
"""Element-wise maximum over all ranks of the job, on the host; the same list on every rank.

Give it a method ``start(values)`` that returns a function which waits for the answer, and ranks ask
ahead of time. Do so only if all ranks call `ChunkGraphs.step` with the same arguments, as
Megatron's schedules do: a single rank that asks again waits for the others forever.
"""


class Agreement:
    """Ask all ranks, and keep the question that was posted ahead of time.

    Args:
        agree: Element-wise maximum over the ranks.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._start: Callable[[Sequence[int]], Callable[[], list[int]]] | None
        self._start = getattr(agree, "start", None)
        self._posted: tuple[list[int], Callable[[], list[int]]] | None = None

    def now(self, values: Sequence[int]) -> list[int]:
        """Return the maximum over all ranks of each value. All ranks forget posted questions."""
        if self._posted is not None:
            self._posted[1]()
            self._posted = None
        return self._agree(values)

    def post(self, values: list[int]) -> None:
        """Post the question of a later `answer` with the same values, if possible."""
        if self._start is not None:
            if self._posted is not None:
                self._posted[1]()
            self._posted = values, self._start(values)

    def answer(self, values: list[int]) -> list[int]:
        """Return the same as `now`, without waiting if the same question was posted before.

        Args:
            values: This rank's values; the last two are a digest and its negative. If the digests
                of the ranks differ, all ranks ask once more and take the new answer.
        """
        posted, self._posted = self._posted, None
        is_same = posted is None or posted[0] == values
        # Wait in any case: collectives of a group end in order.
        agreed = self._agree(values) if posted is None else posted[1]()
        has_one_digest = agreed[-2] == -agreed[-1]
        return agreed if is_same and has_one_digest else self._agree(values)


def agree_alone(values: Sequence[int]) -> list[int]:
    """Return the values: the agreement in a job of one process."""
    return list(values)


_CLOSING_TIME = timedelta(seconds=2)


class Maximum:
    """Compute an element-wise maximum over all ranks, now or ahead of time; see `Agree`.

    Args:
        group: A gloo group that this object owns.
        renew: Returns another one once all groups were destroyed and the job began again; all ranks
            call it together.
    """

    def __init__(self, group: Any, renew: Callable[[], Any] | None = None) -> None:
        self._group, self._renew = group, renew
        self._world = dist.group.WORLD if dist.is_initialized() else None
        self._last: Any = None

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of all ranks' values; waits for the other ranks."""
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start the reduction; return a function that waits for its result."""
        if self._renew is not None and dist.group.WORLD is not self._world:
            self._group, self._world = self._renew(), dist.group.WORLD
        tensor = torch.tensor(list(values), dtype=torch.int64, device=torch.device("cpu"))
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._last = work

        @lost_ranks_named()
        def wait() -> list[int]:
            work.wait()
            return [int(value) for value in tensor]

        return wait

    def close(self) -> None:
        """Destroy the group; no further reduction can start.

        Every step starts the reduction of the next one, so one is pending when training ends. It
        completes unless a rank failed; in that case the group stays until the process ends.
        """
        group, self._group = self._group, None
        if group is None or not dist.is_initialized() or dist.group.WORLD is not self._world:
            return
        if self._last is not None:
            try:
                self._last.wait(_CLOSING_TIME)
            except RuntimeError:
                return
        dist.destroy_process_group(group)


_SILENCE = timedelta(seconds=5)


@contextlib.contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Name the ranks that are silent in errors of torch that end a wait for other ranks.

    Ranks whose wait ends this way tell each other through the job's store. A process that was
    stopped, hangs or has ended tells nothing, and torch's errors do not say which one it is.

    Raises:
        WorkerError: Another rank ended or did not answer in time.
    """
    try:
        yield
    except WorkerError:
        raise
    except RuntimeError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # of the error of a capture
            cause = cause.__cause__
        # Connections of a program's own, such as to its data, have the same words.
        if not dist.is_initialized() or not (
            isinstance(cause, dist.DistError) or "gloo" in str(cause)
        ):
            raise
        if not (loss := describe_loss(cause, str(cause), dist.get_rank())):
            raise
        with contextlib.suppress(Exception):  # the store has ended
            try:
                if silent := ask_store(_silent_ranks, 1.4 * _SILENCE):
                    loss += f" No word from rank {silent}: stopped, hung or ended."
            except WorkerError:
                loss += " The job's store does not answer either; rank 0 serves it, or torchrun."
        atexit.register(kill_stopped_ranks)  # torchrun ends this rank when it notices
        raise WorkerError(loss) from error


def _silent_ranks() -> str:
    """Tell the other ranks that this one waits no longer; return those that do not tell so."""
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone() if hasattr(store, "clone") else store  # others may be waiting
    names = [f"chunkgraph/alive/{rank}" for rank in range(dist.get_world_size())]
    store.set(names[dist.get_rank()], "")
    serves = dist.get_rank() == 0  # perhaps the store, which the others still ask
    with contextlib.suppress(RuntimeError):  # not all have set theirs
        store.wait(names, _SILENCE * (1.4 if serves else 1))
    return ", ".join(str(rank) for rank, name in enumerate(names) if not store.check([name]))


def ask_store(request: Callable[[], Any], limit: timedelta) -> Any:
    """Return what a request to the job's store returns; a stopped process's never answers some.

    Raises:
        WorkerError: The request has not ended a second after the limit, which is the store's own.
    """
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(request())
        except Exception as error:  # noqa: BLE001 - raised below
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()
    try:
        return answer.result(limit.total_seconds() + 1)
    except TimeoutError:
        raise WorkerError(
            f"Rank {dist.get_rank()} stopped because another rank ended or did not answer in time: "
            "the job's store does not answer. Rank 0 serves it, or torchrun."
        ) from None


def agree_on_cause(agree: Agree, cause: str) -> tuple[str, bool]:
    """Choose one cause for all ranks, although they can only exchange maxima of numbers.

    Args:
        agree: see `Agree`; all ranks call it together.
        cause: why this rank failed; "" if it did not.

    Returns:
        Why the session failed ("" if no rank failed), and whether that is this rank's cause.
    """
    text = cause.encode()
    number = (zlib.crc32(text) << 31) + len(text)
    (largest,) = agree([number])
    is_own = number == largest
    num_bytes = largest % 2**31
    if not num_bytes:
        return "", False
    codes = agree([*text] if is_own else [0] * num_bytes)
    return bytes(codes).decode(errors="replace"), is_own


class _RefusedElsewhereError(ConfigError):
    """Another rank's block raised, and all ranks know."""


@contextlib.contextmanager
def refused_together(agree: Agree | None, rank: int) -> Iterator[Callable[[], None]]:
    """Let an error of one rank's block end the block on all ranks, which enter it together.

    Args:
        agree: see `Agree`; None for one rank.
        rank: this rank, as errors name it.

    Yields:
        A function that ends the block here if another rank's has raised. All ranks call it before
        a collective of the block, or creating a group, where one of them can have failed before.

    Raises:
        ConfigError: another rank's block raised; the message has its text.
    """
    agree = agree or agree_alone

    def meet() -> None:
        if cause := agree_on_cause(agree, "")[0]:
            text = f"rank {rank} stopped, since another rank cannot go on.\n{cause}"
            raise _RefusedElsewhereError(text)

    try:
        yield meet
    except (_RefusedElsewhereError, WorkerError):  # the other ranks wait no longer
        raise
    except Exception as error:
        agree_on_cause(agree, f"rank {rank}: {error}")
        raise
    meet()


def refuse_differences(agree: Agree | None, rank: int, facts: Mapping[str, object]) -> None:
    """Check that all ranks have the same facts. They call this together.

    Args:
        agree: see `Agree`; None for one rank.
        rank: this rank.
        facts: values by name, compared as texts.

    Raises:
        ConfigError: a fact differs, or is missing on some rank; raised on all ranks. It names the
            facts, a rank that differs, and both values.
    """
    agree = agree or agree_alone
    own = {name: " ".join(str(value).split()) for name, value in facts.items()}
    digest = zlib.crc32(repr(sorted(own.items())).encode())
    first, most, least = agree([-rank, digest, -digest])
    if most == -least:
        return
    mine = "\n".join(map(": ".join, own.items()))
    text, _ = agree_on_cause(agree, mine if rank == -first else "")
    expected = dict(line.split(": ", 1) for line in text.splitlines())
    names = [n for n in {**expected, **own} if own.get(n) != expected.get(n)]
    lines = "".join(
        f"\n  {n}: {own.get(n, 'missing')} on rank {rank}, {expected.get(n, 'missing')} on rank "
        f"{-first}"
        for n in names
    )
    cause, _ = agree_on_cause(agree, lines)
    raise ConfigError(
        f"The ranks of this job differ, so they cannot train one model:{cause}\n  To do: start all "
        "ranks with the same command, configuration and packages."
    )


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Create a process group whose collectives end after the job's timeout.

    torch's own default is 10 or 30 minutes, whatever the job's timeout is. The ranks of a gloo
    group meet here, through the job's store.

    Args:
        ranks: global ranks of the group; None: all.
        options: further arguments of `torch.distributed.new_group`.

    Raises:
        WorkerError: A rank of a gloo group did not come in time, or the store does not answer.
    """
    timeout = job_timeout()
    if timeout is not None and options.get("pg_options") is not None:
        options["pg_options"]._timeout = timeout  # else torch warns that the argument overrides it
    create = functools.partial(dist.new_group, ranks, timeout=timeout, **options)
    if timeout is None or (options.get("backend") or dist.get_backend()) != "gloo":
        return create()
    with lost_ranks_named():
        return ask_store(create, timeout + _SILENCE)  # torch's own error comes first, if any


def job_timeout() -> timedelta | None:
    """Return the timeout of the default group; None if its backend has none."""
    for kind in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            backend: Any = dist.group.WORLD._get_backend(torch.device(kind))  # type: ignore[union-attr]
            timeout: timedelta = backend.options._timeout
            return timeout
    return None
