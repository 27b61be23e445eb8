"""Before and after: attention kernels against each other and the roofline, servers against themselves."""
