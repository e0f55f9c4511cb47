"""A platform of vLLM for tests: CPUs that Ray counts as the GPUs of a node."""

from pathlib import Path

from vllm.platforms.cpu import CpuPlatform

# Found by vLLM while it decides on a platform, so nothing of vLLM is imported there.
PLUGIN = "def plugin():\n    return 'ray_on_cpu.RayOnCpu'\n"
ENTRY = "[vllm.platform_plugins]\nray_on_cpu = ray_on_cpu_plugin:plugin\n"
METADATA = "Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 1\n"


class RayOnCpu(CpuPlatform):
    """vLLM's CPUs, with a resource for Ray."""

    ray_device_key = "GPU"


def install(folder: Path) -> None:
    """Write what makes vLLM find the platform in a folder of `PYTHONPATH`."""
    (folder / "ray_on_cpu_plugin.py").write_text(PLUGIN)
    about = folder / "ray_on_cpu-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY)
