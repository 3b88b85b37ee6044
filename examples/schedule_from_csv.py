"""Write a zero-bubble schedule as CSV, check it and compare it with 1F1B.

python examples/schedule_from_csv.py zero_bubble.csv
chunkgraph train configs/cpu/gpt_pp2_cpu.yaml pipeline.schedule=zero_bubble.csv \
        train.num_microbatches=[4,4,4]
"""

import sys
from pathlib import Path

from chunkgraph.schedules import CostModel, Schedule, build_schedule, simulate, validate

# One row per rank. 1F2: forward of microbatch 2 on stage 1; I, W: gradient of input, of weights.
CSV = """\
0F0,0F1,0I0,0F2,0I1,0W0,0F3,0I2,0W1,0I3,0W2,0W3
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3
"""

schedule = Schedule.from_csv(CSV, name="mine")
validate(schedule)
costs = CostModel(forward_ms=1.6, backward_ms=4.6, input_grad_ms=2.4, weight_grad_ms=2.2)
base = build_schedule("1f1b", num_ranks=2, num_microbatches=4)
for one in (base, schedule):
    run = simulate(one, costs)
    print(f"{one.name}: {run.makespan_ms:.1f} ms, bubble {run.bubble_ratio(0):.1%}")
Path(sys.argv[1]).write_text(schedule.to_csv())
