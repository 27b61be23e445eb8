"""Every threshold by which steps are counted and rules decide, in one place, each with its reason."""

# Severity, by the part of the step that a finding costs. A tenth is more than run-to-run spread and worth a restart;
# under a thirtieth other work comes first.
HIGH_SHARE = 0.10
MEDIUM_SHARE = 1 / 30

# whole-pool-copy: an op that moves half of the pool's rows copies the pool. A gather of what the requests need moves
# as much only when half of the pool is live in one batch, and then the copy is as good as whole.
WHOLE_POOL = 0.5
# A pool has more rows than any batch has tokens in one step; below this a tensor is an activation or a weight.
POOL_ROWS = 4096
# A view of two dimensions could be a weight; none has the width of an MLA row and this many rows.
FLAT_POOL_ROWS = 65_536
# A head has 64 elements at least, an index of sparse attention 132 bytes; narrower rows are scales and tables.
NARROWEST_ROW = 32

# slow-copy: contiguous copies reach 80 to 90 % of the datasheet's bandwidth (4.25 of 4.8 TB/s measured on an H200), and
# healthy transposing ones 37 % (a recorded H100). Under a third a copy of this size is not limited by memory.
COPY_RATE = 0.85
SLOW_COPY_RATE = 1 / 3
SLOW_COPY_MICROSECONDS = 10.0  # of its time at the peak rate; shorter copies are over before they are at speed
SLOW_COPY_SHARE = 0.02

# small-op-storm: one of these launches a layer is how models are written; hundreds of 1 to 3 us each are unfused.
STORM_LAUNCHES = 100
STORM_MICROSECONDS = 3.0
STORM_SHARE = 0.02

# underfilled-kernel: with fewer blocks than multiprocessors some of the card has nothing to do. What counts is that
# part: persistent kernels leave 4 of 132 free on purpose. Under a twentieth of the step nobody would tune it.
UNDERFILLED_SHARE = 0.05
UNDERFILLED_MICROSECONDS = 5.0  # a launch alone takes 2 to 3 us, which more blocks would not shorten
UNDERFILLED_MS = 0.05  # a step of which this is a twentieth is no model's

# host-bound: steps served from graphs wait for the host in 0.1 to 4 % of their time while they are profiled; an eager
# decode step that cannot keep up, in 29 %.
HOST_BOUND_IDLE = 0.15
# In such a step nearly all idle time is the host's (97 %). Where most of it has another reason, another stream is
# waited for, or events are missing: in a trace that was thinned out the host's part is 37 %.
HOST_BOUND_OF_IDLE = 0.5
# An empty queue runs what is launched within 9 to 40 us; what waits longer was waiting for something else.
LATE_LAUNCH_MICROSECONDS = 50.0

# host-sync: waiting for the device inside a step stops the host from running ahead, and what it costs is how long the
# device then has nothing to do; below a hundredth of the step this cannot be seen.
SYNC_IDLE_SHARE = 0.01
SYNC_MICROSECONDS = 50.0  # shorter calls found the device done: the call alone takes 2 to 20 us

# exposed-communication: what no kernel of the model hides. One collective a layer costs a few percent everywhere.
EXPOSED_SHARE = 0.05

# straggler-rank: ranks of one kind of work differ by 1 to 2 % (clocks, experts); from a twentieth on the others wait.
STRAGGLER_EXCESS = 0.05

# dropped-events: figures are printed to four digits; with a hundredth of the events missing the third is wrong.
DROPPED_SHARE = 0.01
# A step, or a graph's replay, is complete if it has this share of the device events that its like have.
COMPLETE_SHARE = 0.99
# A graph starts a kernel 1 to 5 us after the one before, and recorded replays are idle for 1 to 8 % of their time. Half
# of it, in gaps of this many microseconds on average, is kernels that ran and were not recorded.
REPLAY_IDLE = 0.5
REPLAY_GAP_MICROSECONDS = 20.0
