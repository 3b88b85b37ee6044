"""Steps that are drawn as text and as SVG, one of each shape of picture, and any other step."""

from __future__ import annotations

from hypothesis import strategies as st

from chunkgraph.schedules import build_schedule, get_family, legal_counts, list_schedules

CASES = [
    build_schedule("interleaved", num_ranks=4, num_chunks=2, num_microbatches=12),
    build_schedule("zb-h1", num_ranks=3, num_microbatches=11),
    build_schedule("1f1b", num_ranks=12, num_microbatches=3),
    build_schedule("gpipe", num_ranks=1, num_microbatches=1),
    build_schedule("interleaved-zb", num_ranks=2, num_chunks=2, num_microbatches=4),
    build_schedule("zb-v", num_ranks=3, num_chunks=2, num_microbatches=5),
    build_schedule("dualpipe-v", num_ranks=3, num_chunks=2, num_microbatches=7),
]


@st.composite
def legal_steps(draw: st.DrawFn) -> tuple[str, dict[str, int], int]:
    """Draw a legal step of any schedule: its name, its sizes and the number of microbatches."""
    name = draw(st.sampled_from(list_schedules()))
    family = get_family(name)
    num_chunks = family.num_chunks or draw(st.integers(2, 4))
    num_ranks = draw(st.integers(1 if num_chunks == 1 else 2, 6))
    sizes = {"num_ranks": num_ranks, "num_chunks": num_chunks}
    largest = 20
    if family.interleaves:
        sizes["group_size"] = draw(st.integers(num_ranks, 2 * num_ranks + 2))
        largest = 3 * sizes["group_size"]
    return name, sizes, draw(st.sampled_from(legal_counts(**sizes, schedule=name).up_to(largest)))


SCHEDULES = legal_steps().map(
    lambda step: build_schedule(step[0], **step[1], num_microbatches=step[2])
)
