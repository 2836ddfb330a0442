"""Runtime under both pipelines: configuration, runs, checkpoints, Ray, DeepSpeed. Knows neither pipeline."""
