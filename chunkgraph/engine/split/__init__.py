"""Split backwards: the input gradients first, the weight gradients when the schedule has time."""
