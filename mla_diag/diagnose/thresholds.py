"""Every threshold that a rule decides by, in one place, each with its reason."""

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

# slow-copy: copies reach 80 to 90 % of the datasheet's bandwidth (4.25 of 4.8 TB/s measured on an H200). Under 40 % of
# it a copy of this size is not limited by memory.
SLOW_COPY_BANDWIDTH = 0.40
SLOW_COPY_BYTES = 10_000_000  # smaller ones are over before they are at speed
SLOW_COPY_SHARE = 0.02

# small-op-storm: one of these launches a layer is how models are written; hundreds of 1 to 3 us each are unfused.
STORM_LAUNCHES = 100
STORM_MICROSECONDS = 3.0
STORM_SHARE = 0.02

# underfilled-kernel: with fewer blocks than multiprocessors some of the card has nothing to do. Under a twentieth of
# the step nobody would tune it.
UNDERFILLED_SHARE = 0.05

# host-bound: the gaps of a healthy graph replay leave the device busy for over 95 % of the step; eager ones that keep
# up, 90 %.
HOST_BOUND_BUSY = 0.85

# host-sync: waiting for the device inside a step stops the host from running ahead; below this it cannot be seen.
SYNC_WALL_SHARE = 0.01
SYNC_MICROSECONDS = 50.0

# exposed-communication: what no kernel of the model hides. One collective a layer costs a few percent everywhere.
EXPOSED_SHARE = 0.05

# straggler-rank: ranks of one kind of work differ by 1 to 2 % (clocks, experts); from a twentieth on the others wait.
STRAGGLER_EXCESS = 0.05

# dropped-events: figures are printed to four digits; with a hundredth of the events missing the third is wrong.
DROPPED_SHARE = 0.01
