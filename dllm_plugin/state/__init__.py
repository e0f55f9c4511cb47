"""Keep what a request carries from one denoising step to the next, preempted requests included."""
