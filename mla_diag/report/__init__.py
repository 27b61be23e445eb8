"""A diagnosis to what somebody reads: one module an output, all of them views of the same schema."""
