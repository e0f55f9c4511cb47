"""Run models: workers and model runners, for GPUs and CPUs."""
