"""Front processes: HTTP and gRPC beside the process that holds the models, for machines with many cores."""
